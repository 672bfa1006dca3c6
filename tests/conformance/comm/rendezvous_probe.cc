// A rank that joins, calls all_reduce once, and prints its place in the job.
//   rendezvous_probe [--explicit RANK SIZE ADDRESS] [--join-timeout MS] [--transport NAME] [--twice]
#include <ATen/ATen.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/comm/init.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  comm::InitOptions options;
  bool twice = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--explicit" && i + 3 < argc) {
      options.rank = std::atoi(argv[i + 1]);
      options.world_size = std::atoi(argv[i + 2]);
      options.address = argv[i + 3];
      i += 3;
    } else if (word == "--join-timeout" && i + 1 < argc) {
      options.join_timeout = std::chrono::milliseconds(std::atoi(argv[++i]));
    } else if (word == "--transport" && i + 1 < argc) {
      options.transport = argv[++i];
    } else if (word == "--twice") {
      twice = true;
    }
  }
  try {
    comm::Group world = comm::init(options);
    if (twice) {
      comm::Group same = comm::init();
      same.barrier();
      world.barrier();
      std::printf("the same world: %s %d\n", same.name().c_str(), same.size());
    }
    const at::Tensor sum = at::full({1}, world.rank() + 1, at::kLong);
    world.all_reduce(sum);
    std::printf("rank %d of %d, local %d of %d, host %d of %d, %s, sum %ld\n", world.rank(), world.size(),
                world.local_rank(), world.local_size(), world.node_rank(), world.num_nodes(),
                std::string(world.transport()).c_str(), static_cast<long>(sum.item<std::int64_t>()));
  } catch (const base::Error& error) {
    std::printf("error %s: %s (%s)\n", std::string(base::name(error.cause())).c_str(), error.what(),
                error.hint().c_str());
    return base::exit_code(error.cause());
  }
  return 0;
}
