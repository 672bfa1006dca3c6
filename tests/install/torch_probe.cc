// Adds three ones with libtorch, and fails if a CUDA library that only GPU programs need has been loaded.
#include <ATen/ops/ones.h>

#include <fstream>
#include <iostream>
#include <string>

#include "lockstep/base/net/socket.h"

int main() {
  const double sum = at::ones({3}).sum().item<double>();
  if (sum != 3) {
    std::cerr << "the sum of three ones is " << sum << "\n";
    return 1;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    for (const char* library : {"libtorch_cuda", "libc10_cuda", "libcublas", "libcudnn", "libnccl"})
      if (line.find(library) != std::string::npos) {
        std::cerr << "a CPU program has loaded " << line << "\n";
        return 1;
      }
  std::cout << "three ones are 3 on " << lockstep::base::net::host_name() << "\n";
}
