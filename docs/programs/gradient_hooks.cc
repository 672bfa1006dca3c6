// The program of docs/how-to/gradient-hooks.md: compressed gradients, and a hook with error feedback.
//   lockstep run -n 2 docs_gradient_hooks
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "docs/programs/small_training.h"

namespace {

// docs: begin hook
/// Sends gradients as bfloat16, and adds to the next gradient what rounding has removed from this one.
class ErrorFeedbackHook final : public lockstep::comm::GradientHook {
 public:
  std::string name() const override { return "bf16 with error feedback"; }

  void buckets_changed(const std::vector<lockstep::comm::Bucket>& buckets) override {
    states_.clear();
    for (const auto& bucket : buckets)
      states_.push_back({torch::zeros_like(bucket.buffer), bucket.buffer.to(torch::kBFloat16)});
  }

  lockstep::comm::PendingPtr start(lockstep::comm::Bucket& bucket, lockstep::comm::HookContext& context) override {
    auto& [error, sent] = states_[bucket.index];
    error.add_(bucket.buffer);
    sent.copy_(error);  // rounds
    error.sub_(sent);
    return context.all_reduce(sent);
  }

  void finish(lockstep::comm::Bucket& bucket, lockstep::comm::HookContext&) override {
    bucket.buffer.copy_(states_[bucket.index].sent);
  }

 private:
  struct State {
    torch::Tensor error;  // what this rank has not sent yet
    torch::Tensor sent;
  };
  std::vector<State> states_;  // by bucket
};
// docs: end hook

void train(torch::nn::Sequential& net, const lockstep::Group& world) {
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const auto loss = net->forward(batch(world, step)).pow(2).mean();
    loss.backward();
    optimizer.step();
    (step == 0 ? first : last) = loss.item<double>();
  }
  expect(last < first, "the loss falls");
}

int run(int, char**) {
  const lockstep::Group world = lockstep::init();
  // docs: begin use
  auto net = make_net();
  lockstep::DistributedDataParallel ddp(net, world, {.hook = std::make_shared<lockstep::ddp::Bf16CompressHook>()});
  // docs: end use
  train(net, world);

  auto other = make_net();
  lockstep::DistributedDataParallel other_ddp(other, world, {.hook = std::make_shared<ErrorFeedbackHook>()});
  train(other, world);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::main(argc, argv, run); }
