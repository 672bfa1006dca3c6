#include "lockstep/comm/gpu/cuda.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "lockstep/base/error.h"

namespace lockstep::comm::gpu {
namespace {

// Error codes of the CUDA runtime. This file does not include its headers.
constexpr int kErrorInsufficientDriver = 35;  // no driver, or one that is too old
constexpr int kErrorNoDevice = 100;

/// Returns a function of the CUDA runtime, which libtorch_cpu links in a libtorch for CUDA, or null.
template <typename Function>
Function* cuda_symbol(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

/// Returns "13.0" for 13000.
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
  if (!call) return {.missing = "this libtorch has no CUDA"};
  int count = 0;
  const int error = call(&count);
  if (error == 0 && count > 0) return {.count = count};
  if (const int last = peek_cuda_error(); last != 0)
    cuda_symbol<int()>("cudaGetLastError")();  // otherwise libtorch would report the error at its next CUDA call
  if (error == 0 || error == kErrorNoDevice)
    return {.missing = "no GPU is visible (nvidia-smi lists the GPUs, CUDA_VISIBLE_DEVICES selects the visible ones)"};
  const int driver = cuda_version_from("cudaDriverGetVersion");
  if (error == kErrorInsufficientDriver && driver == 0) return {.missing = "this host has no NVIDIA driver"};
  std::string text = "CUDA reports " + cuda_error_name(error);
  if (error == kErrorInsufficientDriver)
    text = "NVIDIA's driver is too old: it supports CUDA " + version_text(driver) + ", and libtorch requires CUDA " +
           version_text(cuda_version_from("cudaRuntimeGetVersion"));
  return {.missing = text, .driver_broken = true};
}

void load_cuda() {
  const std::string library = libtorch_directory() + "libtorch_cuda.so";
  // RTLD_GLOBAL, because kernels register themselves and NCCL's functions are looked up by name.
  if (!::dlopen(library.c_str(), RTLD_LAZY | RTLD_GLOBAL)) {
    const std::string why = ::dlerror();
    throw base::UsageError("cannot load libtorch's library for GPUs: " + why,
                           "install the packages that the torch wheel requires, or set LOCKSTEP_DEVICE=cpu");
  }
  if (!at::globalContext().hasCUDA())
    throw base::UsageError(
        "libtorch checked for GPUs before lockstep::init() loaded libtorch_cuda, and does not check again",
        "call lockstep::init() before torch::manual_seed(), torch::cuda::is_available() and similar functions, link "
        "libtorch_cuda, or set LOCKSTEP_DEVICE=cpu");
}

Gpu describe_gpu(int index) {
  // In CUDA 11 to 13 cudaDeviceProp begins with 256 bytes of name and 16 bytes of UUID. It is not larger than this
  // struct.
  struct {
    char name[256];
    unsigned char uuid[16];
    char rest[8192];
  } properties{};
  auto* call = cuda_symbol<int(void*, int)>("cudaGetDeviceProperties_v2");
  if (!call) call = cuda_symbol<int(void*, int)>("cudaGetDeviceProperties");
  const int error = call ? call(&properties, index) : -1;
  if (error != 0)
    throw base::Error(base::Cause::kResource, "cannot read the properties of cuda:" + std::to_string(index) +
                                                  ": CUDA reports " + cuda_error_name(error));
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

}  // namespace lockstep::comm::gpu
