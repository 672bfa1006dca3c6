// A rank that prints its device, and whether init() loaded libtorch_cuda.
//   gpu_probe [late]   late: libtorch queries the GPUs before init()
#include <ATen/Context.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/comm/init.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  try {
    if (argc > 1 && std::strcmp(argv[1], "late") == 0) at::manual_seed(1);
    const comm::Group world = comm::init();
    std::ifstream maps("/proc/self/maps");
    bool loaded = false;
    for (std::string line; std::getline(maps, line);) loaded |= line.find("libtorch_cuda.so") != std::string::npos;
    std::printf("on %s, libtorch_cuda %s\n", world.device().str().c_str(), loaded ? "is loaded" : "is not loaded");
    return 0;
  } catch (const base::Error& error) {
    std::printf("%s (%s)\n", error.what(), error.hint().c_str());
    return base::exit_code(error.cause());
  }
}
