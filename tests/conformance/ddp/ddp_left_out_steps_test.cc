// Tests that a step which one rank leaves out is an error of the next reduction. Each case is a job of its own.
#include "lockstep/base/error.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests::ddp_left_out_steps_test {
namespace {

using base::Cause;
using ddp::DistributedDataParallel;

void forward_backward(Mlp& net, int step) {
  net->forward(batch_of(world().rank(), step, {4, 7})).pow(2).sum().backward();
}

TEST(DdpLeftOutSteps, OfATorchOptimizer) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  int done = 0;
  expect_error(Cause::kDesync, {"optimizer step"}, [&] {
    for (; done < 5; ++done) {
      optimizer.zero_grad();
      forward_backward(net, done);
      if (done == 2 && world().rank() == 1) continue;
      optimizer.step();
      ddp.count_optimizer_step();  // as the hook of Python's optimizers does
    }
  });
  EXPECT_EQ(done, 3);
}

TEST(DdpLeftOutSteps, OfAFusedOptimizer) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD optimizer(ddp, {.lr = 0.1});
  int done = 0;
  expect_error(Cause::kDesync, {"rank 0", "rank 1"}, [&] {
    for (; done < 5; ++done) {
      optimizer.zero_grad();
      forward_backward(net, done);
      if (done == 2 && world().rank() == 1) continue;
      optimizer.step();
    }
  });
  EXPECT_LE(done, 3);  // where ranks share the parameters, the others fail in the step itself
}

}  // namespace
}  // namespace lockstep::tests::ddp_left_out_steps_test
