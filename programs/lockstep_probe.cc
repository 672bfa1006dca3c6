// The program lockstep-probe. It prints one line of JSON with the versions of libtorch, CUDA, NCCL and MPI on this
// host. `lockstep doctor` runs it on each host. It calls CUDA and NCCL through libtorch's own CUDA library, which it
// loads if there is one; it links neither.
#include <ATen/Version.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

using nlohmann::ordered_json;

/// Returns "12.8" for 12080, CUDA's encoding of a version.
std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

/// Returns "2.28.9" for 22809, NCCL's encoding of a version since 2.9; before that, 2804 meant 2.8.4.
std::string nccl_version(int number) {
  const int major = number < 10000 ? 1000 : 10000;
  return std::to_string(number / major) + "." + std::to_string(number % major / 100) + "." +
         std::to_string(number % 100);
}

template <typename Function>
Function* function(void* library, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

/// Returns the memory sizes of the devices that CUDA reports. The array is empty if there is no driver, or if the
/// driver is too old.
ordered_json devices(void* library) {
  ordered_json all = ordered_json::array();
  auto* count = function<int(int*)>(library, "cudaGetDeviceCount");
  auto* choose = function<int(int)>(library, "cudaSetDevice");
  auto* memory = function<int(std::size_t*, std::size_t*)>(library, "cudaMemGetInfo");
  int num_devices = 0;
  if (!count || !choose || !memory || count(&num_devices) != 0) return all;
  for (int device = 0; device < num_devices; ++device) {
    std::size_t free = 0, total = 0;
    const bool known = choose(device) == 0 && memory(&free, &total) == 0;
    all.push_back({{"device", device}, {"bytes", known ? total : 0}, {"free_bytes", known ? free : 0}});
  }
  return all;
}

void probe_cuda(ordered_json& found) {
  void* library = ::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_LOCAL);
  if (!library) {
    const std::string why = ::dlerror();
    if (why.find("libtorch_cuda.so: cannot open") == std::string::npos)
      found["cuda_error"] = why;  // the library exists, but one of its dependencies does not
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

/// Adds the version text of the MPI library on this host: Open MPI 4 or 5, otherwise MPICH or a compatible library.
/// Does not initialise MPI.
void probe_mpi(ordered_json& found) {
  for (const char* name : {"libmpi.so.40", "libmpi.so.12"}) {
    void* library = ::dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    auto* version = library ? function<int(char*, int*)>(library, "MPI_Get_library_version") : nullptr;
    std::vector<char> text(std::size_t{1} << 16);  // MPICH writes 8 KiB
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
  // This call proves that libtorch itself can be loaded.
  found["cpu"] = at::get_cpu_capability();
  probe_mpi(found);
  std::puts(found.dump().c_str());
  return 0;
}
