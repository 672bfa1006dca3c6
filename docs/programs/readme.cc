// docs: begin program
#include <lockstep/lockstep.h>
#include <torch/torch.h>

// docs: end program
struct NetImpl : torch::nn::Module {
  NetImpl() : fc(register_module("fc", torch::nn::Linear(2, 2))) {}
  torch::Tensor forward(const torch::Tensor& x) { return torch::log_softmax(fc(x), 1); }
  torch::nn::Linear fc;
};
TORCH_MODULE(Net);

/// Points in the plane, labelled by the side of a line on which they are.
struct Points : torch::data::datasets::Dataset<Points> {
  torch::data::Example<> get(std::size_t index) override {
    const auto x = static_cast<float>(index % 37) / 37.0f;
    const auto y = static_cast<float>(index % 53) / 53.0f;
    return {torch::tensor({x, y}), torch::tensor(static_cast<std::int64_t>(x > y))};
  }
  std::optional<std::size_t> size() const override { return 1000; }
};

// docs: begin program
int main() {
  lockstep::Group world = lockstep::init();             // without a launcher: a world of one rank
  Net net;                                              // an ordinary module; it is not wrapped
  lockstep::DistributedDataParallel ddp(net, world);    // broadcasts parameters; then averages gradients
  torch::optim::SGD optimizer(net->parameters(), 0.1);  // may be constructed before or after ddp
  auto loader = lockstep::data::make_loader(Points(), world, {.batch_size = 64, .seed = 1});

  for (int epoch = 0; epoch < 3; ++epoch)
    for (auto& batch : loader) {  // one epoch of this rank's part of the data, in a new order
      optimizer.zero_grad();
      auto loss = torch::nll_loss(net->forward(batch.data), batch.target);
      loss.backward();  // on return, gradients are the means over all ranks
      optimizer.step();
    }
  if (world.rank() == 0) lockstep::save(net, "net.safetensors");  // parameter names without a "module." prefix
}
// docs: end program
