#include "tests/support/gpu/kernels.h"

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
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

// The arguments of multi_tensor_apply_kernel, by which _foreach_ and _fused_ operations process lists of tensors: the
// layouts of ATen/native/cuda/MultiTensorApply.cuh. Block b works on elements [chunk * kChunk, (chunk + 1) * kChunk) of
// its tensor.
constexpr std::int64_t kChunk = 65536;
#ifdef LOCKSTEP_LARGE_KERNEL_ARGUMENTS
using BlockIndex = std::uint16_t;
constexpr int kMaxBlocks = 2240, kMaxTensorsOf1 = 770, kMaxTensorsOf4 = 252;
#else
using BlockIndex = unsigned char;
constexpr int kMaxBlocks = 320, kMaxTensorsOf1 = 110, kMaxTensorsOf4 = 36;
#endif

template <int lists, int tensors>
struct TensorLists {
  void* data[lists][tensors];
  std::int64_t count[tensors];
  BlockIndex block_to_tensor[kMaxBlocks];
  int block_to_chunk[kMaxBlocks];
  int first_tensor;
};
template <int lists, int tensors>
struct OptimizerTensorLists {
  void* data[lists][tensors];
  std::int64_t count[tensors];
  const float* steps[tensors];
  BlockIndex block_to_tensor[kMaxBlocks];
  int block_to_chunk[kMaxBlocks];
  int first_tensor;
};

/// Calls visit(tensor, element) for all elements of all blocks.
template <typename Lists, typename Visit>
void for_each_element(const Lists& lists, unsigned blocks, const Visit& visit) {
  for (unsigned block = 0; block < blocks; ++block) {
    const int tensor = lists.block_to_tensor[block];
    const std::int64_t begin = lists.block_to_chunk[block] * kChunk;
    for (std::int64_t i = begin; i < std::min(lists.count[tensor], begin + kChunk); ++i) visit(tensor, i);
  }
}

/// FusedAdamMathFunctor<float, 4, MODE, false> of ATen/native/cuda/fused_adam_utils.cuh.
std::function<void()> fused_adam(bool decoupled, unsigned blocks, void** arguments) {
  const auto number = [&](int i) { return static_cast<float>(*static_cast<const double*>(arguments[i])); };
  const auto pointer = [&](int i) { return *static_cast<const float* const*>(arguments[i]); };
  return [=, lists = *static_cast<const OptimizerTensorLists<4, kMaxTensorsOf4>*>(arguments[0]),
          lr_pointer = pointer(2), lr_number = number(3), beta1 = number(4), beta2 = number(5), decay = number(6),
          eps = number(7), found_inf = pointer(10)] {
    if (found_inf && *found_inf == 1) return;
    const float lr = lr_pointer ? *lr_pointer : lr_number;
    for_each_element(lists, blocks, [&](int tensor, std::int64_t i) {
      const auto at = [&](int list) -> float& { return static_cast<float*>(lists.data[list][tensor])[i]; };
      float& parameter = at(0);
      float gradient = at(1);
      float &first = at(2), &second = at(3);
      const float step = *lists.steps[tensor];
      if (decoupled)
        parameter -= lr * decay * parameter;
      else
        gradient += parameter * decay;
      first = beta1 * first + (1 - beta1) * gradient;
      second = beta2 * second + (1 - beta2) * gradient * gradient;
      const float below = std::sqrt(second) / std::sqrt(1 - std::pow(beta2, step)) + eps;
      parameter -= lr / (1 - std::pow(beta1, step)) * first / below;
    });
  };
}

std::function<void()> list_by_list(const std::string& name, unsigned blocks, void** arguments) {
  const auto has = [&](const char* text) { return name.find(text) != std::string::npos; };
  if (has("TensorListMetadata<1>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<float") &&
      has("std::plus<float>")) {
    const float added = *static_cast<const float*>(arguments[3]);
    return [=, lists = *static_cast<const TensorLists<1, kMaxTensorsOf1>*>(arguments[0])] {
      for_each_element(lists, blocks,
                       [&](int tensor, std::int64_t i) { static_cast<float*>(lists.data[0][tensor])[i] += added; });
    };
  }
  if (has("FusedAdamMathFunctor<float, 4, ")) return fused_adam(has("ADAM_MODE)1"), blocks, arguments);
  return {};
}

}  // namespace

std::function<void()> make_kernel_task(const std::string& mangled, unsigned blocks, void** arguments) {
  const std::string name = demangle(mangled.c_str());
  if (name.find("multi_tensor_apply_kernel<") != std::string::npos) return list_by_list(name, blocks, arguments);
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

cudaError_t __cudaLaunchKernel(cudaKernel_t what, dim3 blocks, dim3, void** arguments, std::size_t,
                               cudaStream_t stream) {
  const auto found = kernel_names().find(what);
  const char* mangled = found == kernel_names().end() ? "?" : found->second;
  auto task = make_kernel_task(mangled, blocks.x, arguments);
  if (!task) {
    std::fprintf(stderr, "the fake GPU does not implement the kernel %s\n", demangle(mangled).c_str());
    return cudaErrorNoKernelImageForDevice;
  }
  enqueue(stream, std::move(task));
  return cudaSuccess;
}
}
