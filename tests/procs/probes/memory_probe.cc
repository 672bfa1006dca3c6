// A rank that needs much memory.
//   memory_probe tensors MIB [refused]  keeps tensors of MIB in all, which it allocates and fills in pieces of 16 MiB.
//                                       After each piece, all ranks wait for each other
//   memory_probe train MIB [refused...] trains a model whose parameters have MIB in all, with a fused optimizer
//   memory_probe groups N [refused]     creates N groups
//   memory_probe private MIB            fills memory outside the arena
// With refused, the kernel gives rank 1 no more shared memory after init(); with refused_late, rank 0 no more before it
// creates the optimizer.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "lockstep/comm/init.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/ddp/ddp.h"
#include "lockstep/optim/adam.h"
#include "tests/support/limits/refuse_memory.h"

namespace {

using lockstep::comm::Group;

constexpr std::int64_t kPieceMib = 16;
constexpr std::int64_t kWidth = 2048;  // a square of float32 of that width has 16 MiB

void allocate_tensors(Group& world, std::int64_t mib) {
  std::vector<at::Tensor> tensors;
  for (std::int64_t sum = 0; sum < mib; sum += kPieceMib) {
    tensors.push_back(torch::full({kPieceMib << 20}, 1, torch::kByte));
    world.barrier();
  }
}

void train(Group& world, std::int64_t mib, bool refused_late) {
  torch::nn::Sequential net;
  for (std::int64_t sum = 0; sum < mib; sum += kPieceMib)
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  lockstep::ddp::DistributedDataParallel ddp(net, world);
  if (refused_late && world.rank() == 0 && !lockstep::tests::refuse_fallocate()) std::exit(77);
  lockstep::optim::AdamW optimizer(ddp, {.lr = 1e-4});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(torch::ones({4, kWidth})).pow(2).mean().backward();
    optimizer.step();
  }
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const std::int64_t amount = argc > 2 ? std::atoll(argv[2]) : 0;
  Group world = lockstep::comm::init();
  const std::string refused = argc > 3 ? argv[3] : "";
  if (refused == "refused" && world.rank() == 1 && !lockstep::tests::refuse_fallocate()) return 77;
  if (what == "tensors") allocate_tensors(world, amount);
  if (what == "train") train(world, amount, refused == "refused_late");
  if (what == "private") {
    const std::vector<char> memory(static_cast<std::size_t>(amount) << 20, 1);
    world.barrier();
  }
  std::vector<Group> groups;
  for (int i = 0; what == "groups" && i < amount; ++i) groups.push_back(world.split(0));
  std::printf("done\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return lockstep::comm::main(argc, argv, run); }
