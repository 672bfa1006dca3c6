#include "lockstep/comm/cuda/cuda.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "lockstep/base/error.h"

namespace lockstep::comm {
namespace {

// Numbers of CUDA's runtime, whose headers are not needed for more.
constexpr int kErrorInsufficientDriver = 35;  // or one that is too old
constexpr int kErrorNoDevice = 100;

/// A function of the runtime, which a libtorch_cpu for CUDA brings along.
template <typename Function>
Function* cuda_symbol(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

/// "13.0" of 13000.
std::string version_text(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

int cuda_version_from(const char* function) {
  auto* call = cuda_symbol<int(int*)>(function);
  int number = 0;
  return call && call(&number) == 0 ? number : 0;
}

std::string libtorch_directory() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<const void*>(&at::globalContext), &info);
  const std::string path = info.dli_fname ? info.dli_fname : "";
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace

VisibleGpus visible_gpus() {
  auto* call = cuda_symbol<int(int*)>("cudaGetDeviceCount");
  if (!call) return {.missing = "libtorch has no CUDA here"};
  int count = 0;
  const int error = call(&count);
  if (error == 0 && count > 0) return {.count = count};
  if (const int last = peek_cuda_error(); last != 0)
    cuda_symbol<int()>("cudaGetLastError")();  // else libtorch would take it for its own
  if (error == 0 || error == kErrorNoDevice)
    return {.missing = "no GPU is visible (nvidia-smi lists them, CUDA_VISIBLE_DEVICES chooses)"};
  const int driver = cuda_version_from("cudaDriverGetVersion");
  if (error == kErrorInsufficientDriver && driver == 0) return {.missing = "this host has no NVIDIA driver"};
  std::string text = "CUDA says " + cuda_error_name(error);
  if (error == kErrorInsufficientDriver)
    text = "NVIDIA's driver here is too old: it is for CUDA " + version_text(driver) + ", libtorch for CUDA " +
           version_text(cuda_version_from("cudaRuntimeGetVersion"));
  return {.missing = text, .driver_broken = true};
}

void load_cuda() {
  const std::string library = libtorch_directory() + "libtorch_cuda.so";
  // Global: kernels register themselves, and NCCL's functions are looked up by name.
  if (!::dlopen(library.c_str(), RTLD_LAZY | RTLD_GLOBAL)) {
    const std::string why = ::dlerror();
    throw base::UsageError("libtorch's library for GPUs cannot be loaded: " + why,
                           "install the packages that the wheel torch names, or set LOCKSTEP_DEVICE=cpu");
  }
  if (!at::globalContext().hasCUDA())
    throw base::UsageError(
        "libtorch has looked for GPUs before lockstep::init() loaded its library for them, and does not look again",
        "call lockstep::init() before torch::manual_seed(), torch::cuda::is_available() and the like, link "
        "libtorch_cuda, or set LOCKSTEP_DEVICE=cpu");
}

Gpu describe_gpu(int index) {
  // cudaDeviceProp begins with a name of 256 bytes and 16 of the UUID, in CUDA 11 to 13; it is not larger than this.
  struct {
    char name[256];
    unsigned char uuid[16];
    char rest[8192];
  } properties{};
  auto* call = cuda_symbol<int(void*, int)>("cudaGetDeviceProperties_v2");
  if (!call) call = cuda_symbol<int(void*, int)>("cudaGetDeviceProperties");
  const int error = call ? call(&properties, index) : -1;
  if (error != 0)
    throw base::Error(base::Cause::kResource, "cuda:" + std::to_string(index) +
                                                  " cannot be asked what it is: CUDA says " + cuda_error_name(error));
  std::string uuid = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char hex[4];
    std::snprintf(hex, sizeof hex, "%02x", properties.uuid[i]);
    uuid += (i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(hex);
  }
  return {.index = index,
          .name = std::string(properties.name, ::strnlen(properties.name, sizeof properties.name)),
          .uuid = uuid};
}

void set_current_gpu(int index) {
  c10::impl::VirtualGuardImpl(at::kCUDA).uncheckedSetDevice(
      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index)));
}

std::string cuda_error_name(int error) {
  auto* call = cuda_symbol<const char*(int)>("cudaGetErrorName");
  const char* name = call ? call(error) : nullptr;
  return name && std::strcmp(name, "unrecognized error code") != 0 ? name : "";
}

int peek_cuda_error() {
  auto* call = cuda_symbol<int()>("cudaPeekAtLastError");
  return call ? call() : 0;
}

}  // namespace lockstep::comm
