// A training whose checkpoints test_checkpoint.py exchanges with the Python package.
// Usage: python_state_exchange save|resume FOLDER. Prints the state.
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstring>

namespace {

void print(const char* name, const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kDouble).flatten();
  std::printf("%s", name);
  for (std::int64_t i = 0; i < values.numel(); ++i) std::printf(" %.9g", values[i].item<double>());
  std::printf("\n");
}

void run(bool resume, const char* folder) {
  lockstep::Group world = lockstep::init();
  torch::nn::Linear net(3, 2);
  const torch::NoGradGuard no_grad;
  net->weight.copy_(at::arange(6).view({2, 3}));
  net->bias.fill_(resume ? 0 : 1);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(resume ? 1.0 : 0.25).weight_decay(0.5));
  auto loader = lockstep::data::make_loader(12, [](std::size_t i) { return at::full({1}, static_cast<double>(i)); },
                                            world, {.batch_size = 2, .seed = 3});
  double best = 0;
  lockstep::training::TrainingState state(world, folder, {.settings = {{"batch_size", std::int64_t{2}}}});
  state.add("model", *net).add("optimizer", optimizer, *net).add("loader", loader).add("best", best);
  state.add_random_state();
  if (state.resume() != resume) throw lockstep::UsageError("the folder has a checkpoint, or none");
  if (!resume) {
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = at::full_like(parameter, 0.5);
    optimizer.step();
    optimizer.step();
    for ([[maybe_unused]] auto& batch : loader.epoch(1)) break;
    best = 0.75;
    torch::manual_seed(11);
    state.save(5);
  }
  print("weight", net->weight);
  print("bias", net->bias);
  const auto& adam =
      static_cast<const torch::optim::AdamWParamState&>(*optimizer.state().at(net->weight.unsafeGetTensorImpl()));
  print("exp_avg_sq", adam.exp_avg_sq());
  std::printf("steps %lld\nlr %.9g\nbest %.9g\n", static_cast<long long>(adam.step()),
              static_cast<const torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(), best);
  std::printf("epoch %llu\nsamples_drawn %llu\n", static_cast<unsigned long long>(loader.position().epoch),
              static_cast<unsigned long long>(loader.position().samples_drawn));
  print("random", torch::rand({3}));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  run(std::strcmp(argv[1], "resume") == 0, argv[2]);
}
