#include "tests/support/gpu/kernels.h"

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "tests/support/gpu/fake_gpu.h"

namespace fake_gpu {
namespace {

std::unordered_map<const void*, const char*>& kernel_names() {
  static auto& all = *new std::unordered_map<const void*, const char*>;
  return all;
}

std::string demangle(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string result = text ? text : mangled;
  std::free(text);
  return result;
}

}  // namespace

namespace {

template <typename T, std::size_t n>
struct Pointers {
  T* at[n];
};

/// Implements vectorized_elementwise_kernel(int count, functor, std::array<char*, n>). The scalar of a functor is its
/// first member, or follows an empty functor at the alignment of T.
template <typename T>
std::function<void()> element_by_element(const std::string& name, void** arguments) {
  const int count = *static_cast<const int*>(arguments[0]);
  const auto has = [&](const char* text) { return name.find(text) != std::string::npos; };
  const auto* functor = static_cast<const char*>(arguments[1]);
  if (has("FillFunctor<")) {
    const T value = *reinterpret_cast<const T*>(functor);
    const auto to = *static_cast<const Pointers<T, 1>*>(arguments[2]);
    return [=] { std::fill_n(to.at[0], count, value); };
  }
  if (has("UnaryFunctor<") && has("binary_internal::MulFunctor<")) {
    const T factor = *reinterpret_cast<const T*>(functor + sizeof(T));
    const auto on = *static_cast<const Pointers<T, 2>*>(arguments[2]);
    return [=] {
      for (int i = 0; i < count; ++i) on.at[0][i] = static_cast<T>(on.at[1][i] * factor);
    };
  }
  if (has("CUDAFunctor_add<") && has("std::array<char*, 3ul>")) {
    const T alpha = *reinterpret_cast<const T*>(functor);
    const auto on = *static_cast<const Pointers<T, 3>*>(arguments[2]);
    return [=] {
      for (int i = 0; i < count; ++i) on.at[0][i] = static_cast<T>(on.at[1][i] + alpha * on.at[2][i]);
    };
  }
  return {};
}

}  // namespace

std::function<void()> make_kernel_task(const std::string& mangled, void** arguments) {
  const std::string name = demangle(mangled.c_str());
  if (name.find("vectorized_elementwise_kernel<") == std::string::npos) return {};
  const auto of = [&](const std::string& type) {
    return name.find("Functor<" + type) != std::string::npos || name.find("Functor_add<" + type) != std::string::npos;
  };
  if (of("float")) return element_by_element<float>(name, arguments);
  if (of("double")) return element_by_element<double>(name, arguments);
  if (of("long")) return element_by_element<std::int64_t>(name, arguments);
  if (of("int")) return element_by_element<std::int32_t>(name, arguments);
  if (of("unsigned char") || of("bool")) return element_by_element<std::uint8_t>(name, arguments);
  return {};
}

}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

__attribute__((visibility("default"))) void __cudaRegisterFunction(void** handle, const char* host, char* device,
                                                                   const char* name, int limit, uint3* tid, uint3* bid,
                                                                   dim3* block, dim3* grid, int* size) {
  kernel_names()[host] = name;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t what, dim3, dim3, void** arguments, std::size_t, cudaStream_t stream) {
  const auto found = kernel_names().find(what);
  const char* mangled = found == kernel_names().end() ? "?" : found->second;
  auto task = make_kernel_task(mangled, arguments);
  if (!task) {
    std::fprintf(stderr, "the fake GPU does not implement the kernel %s\n", demangle(mangled).c_str());
    return cudaErrorNoKernelImageForDevice;
  }
  enqueue(stream, std::move(task));
  return cudaSuccess;
}
}
