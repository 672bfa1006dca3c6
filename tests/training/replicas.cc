// A training with samples that are computed from their indices, so that global batches do not depend on the number of
// ranks.
//   training_replicas STEPS exchange|alone LOSS_FILE
// Rank 0 writes the global mean loss of each step. At the end the ranks compare their parameters byte by byte: the exit
// code is 0 if all are equal, else 3. With "alone", every rank uses no_sync(), as if the gradient reduction were
// broken.
#include <lockstep/base/parse.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <optional>

namespace {

constexpr std::int64_t kGlobalBatch = 24;  // divides by 1, 2, 3 and 4

lockstep::data::Example sample(std::size_t index) {
  const torch::Tensor data =
      (torch::arange(1, 65) * static_cast<std::int64_t>(index % 509 + 1)).remainder(97) / 48.5 - 1;
  return {data, torch::tensor(static_cast<std::int64_t>(index * 7 % 509 % 5))};
}

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return torch::log_softmax(last(torch::tanh(first(x))), 1); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(64, 48));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(48, 5));
};
TORCH_MODULE(Net);

std::string bytes_of(const torch::nn::Module& module) {
  std::string bytes;
  for (const torch::Tensor& parameter : module.parameters())
    bytes.append(static_cast<const char*>(parameter.const_data_ptr()), parameter.nbytes());
  return bytes;
}

int train(std::int64_t steps, bool alone, const std::string& loss_file) {
  lockstep::Group world = lockstep::init();
  torch::manual_seed(world.rank());  // DistributedDataParallel must broadcast the weights of rank 0
  Net net;
  lockstep::DistributedDataParallel ddp(net, world);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto loader = lockstep::data::make_loader(static_cast<std::uint64_t>(steps * kGlobalBatch), sample, world,
                                            {.batch_size = kGlobalBatch / world.size(), .seed = 5});
  std::ofstream losses;
  if (world.rank() == 0) losses.open(loss_file);
  losses.precision(17);
  for (auto& batch : loader.epoch(0)) {
    optimizer.zero_grad();
    torch::Tensor loss = torch::nll_loss(net->forward(batch.data), batch.target);
    {
      std::optional<lockstep::DistributedDataParallel::NoSync> guard;
      if (alone) guard.emplace(ddp);
      loss.backward();
    }
    optimizer.step();
    const torch::Tensor mean = loss.detach().to(torch::kFloat64);
    world.all_reduce(mean, lockstep::ReduceOp::kMean);
    losses << mean.item<double>() << '\n';
  }
  const std::vector<std::string> replicas = world.all_gather_bytes(bytes_of(*net));
  for (const std::string& replica : replicas)
    if (replica != replicas[0]) return 3;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 64;
  const std::string mode = argv[2];
  if (mode != "alone" && mode != "exchange") return 64;
  return train(lockstep::base::parse_int_in_range("STEPS", argv[1], 1, 1000000), mode == "alone", argv[3]);
}
