// The program lockstep-probe: what libtorch is on this host, and what it finds there, as one line of JSON. `lockstep
// doctor` runs it on each host. CUDA and NCCL are asked through libtorch's own library for CUDA, which is loaded when
// it is there: nothing of theirs is linked.
#include <ATen/Version.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

using nlohmann::ordered_json;

/// "12.8" of 12080, as CUDA counts.
std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

/// "2.28.9" of 22809, as NCCL counts since 2.9; before that 2804 was 2.8.4.
std::string nccl_version(int number) {
  const int major = number < 10000 ? 1000 : 10000;
  return std::to_string(number / major) + "." + std::to_string(number % major / 100) + "." +
         std::to_string(number % 100);
}

template <typename Function>
Function* function(void* library, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

/// Sizes of memory as CUDA sees the devices; empty without a driver, or with one that is too old.
ordered_json devices(void* library) {
  ordered_json all = ordered_json::array();
  auto* count = function<int(int*)>(library, "cudaGetDeviceCount");
  auto* choose = function<int(int)>(library, "cudaSetDevice");
  auto* memory = function<int(std::size_t*, std::size_t*)>(library, "cudaMemGetInfo");
  int num_devices = 0;
  if (!count || !choose || !memory || count(&num_devices) != 0) return all;
  for (int device = 0; device < num_devices; ++device) {
    std::size_t free = 0, total = 0;
    const bool seen = choose(device) == 0 && memory(&free, &total) == 0;
    all.push_back({{"device", device}, {"bytes", seen ? total : 0}, {"free_bytes", seen ? free : 0}});
  }
  return all;
}

void probe_cuda(ordered_json& found) {
  void* library = ::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_LOCAL);
  if (!library) {
    const std::string why = ::dlerror();
    if (why.find("libtorch_cuda.so: cannot open") == std::string::npos)
      found["cuda_error"] = why;  // it is there, but a library that it needs is not
    return;
  }
  int number = 0;
  if (auto* version = function<int(int*)>(library, "cudaRuntimeGetVersion"); version && version(&number) == 0)
    found["cuda"] = cuda_version(number);
  if (auto* version = function<int(int*)>(library, "cudaDriverGetVersion");
      version && version(&number) == 0 && number > 0)
    found["driver_cuda"] = cuda_version(number);
  if (auto* version = function<int(int*)>(library, "ncclGetVersion"); version && version(&number) == 0)
    found["nccl"] = nccl_version(number);
  found["devices"] = devices(library);
}

/// What the MPI library on this host says it is: of Open MPI 4 and 5, else of MPICH and its kin. Nothing is
/// initialised.
void probe_mpi(ordered_json& found) {
  for (const char* name : {"libmpi.so.40", "libmpi.so.12"}) {
    void* library = ::dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    auto* version = library ? function<int(char*, int*)>(library, "MPI_Get_library_version") : nullptr;
    std::vector<char> text(std::size_t{1} << 16);  // MPICH tells 8 KiB
    int size = 0;
    if (!version || version(text.data(), &size) != 0) continue;
    const std::string all(text.data());
    found["mpi"] = all.substr(0, all.find('\n'));
    return;
  }
}

}  // namespace

int main() {
  ordered_json found = {{"libtorch", TORCH_VERSION}};
  probe_cuda(found);
  // The library itself must load: that is half of the question.
  found["cpu"] = at::get_cpu_capability();
  probe_mpi(found);
  std::puts(found.dump().c_str());
  return 0;
}
