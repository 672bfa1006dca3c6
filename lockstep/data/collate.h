// From samples to a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace lockstep::data {

/// A sample, or a batch of them: what the datasets of Lockstep give. Any type with the same two members will do for
/// others.
struct Example {
  at::Tensor data;
  at::Tensor target;
};

/// Stacks tensors of one shape and dtype along a new first dimension. Throws UsageError that names `what` ("data"),
/// both samples by `indices`, and both shapes and dtypes, when they differ.
at::Tensor stack(std::string_view what, const std::vector<at::Tensor>& tensors,
                 const std::vector<std::size_t>& indices);

// Nothing but these members: what else a sample holds would be lost in a batch.
template <typename E>
concept HasDataOnly = sizeof(E) == sizeof(at::Tensor) && requires(E e) {
  { e.data } -> std::same_as<at::Tensor&>;
};
template <typename E>
concept HasDataAndTarget = sizeof(E) == 2 * sizeof(at::Tensor) && requires(E e) {
  { e.data } -> std::same_as<at::Tensor&>;
  { e.target } -> std::same_as<at::Tensor&>;
};

/// What a batch of samples of type E is: for samples of `data` and `target` tensors and nothing else
/// (torch::data::Example<>, data::Example) an E of stacked tensors [batch, ...], for `data` alone
/// (torch::data::TensorExample) the same, for a plain tensor a tensor, for any other type a std::vector<E>.
template <typename E>
using CollatedBatch =
    std::conditional_t<HasDataOnly<E> || HasDataAndTarget<E> || std::is_same_v<E, at::Tensor>, E, std::vector<E>>;

template <typename E>
CollatedBatch<E> collate(std::vector<E> samples, const std::vector<std::size_t>& indices) {
  if constexpr (std::is_same_v<E, at::Tensor>) {
    return stack("sample", samples, indices);
  } else if constexpr (HasDataOnly<E> || HasDataAndTarget<E>) {
    std::vector<at::Tensor> data;
    for (auto& sample : samples) data.push_back(sample.data);
    if constexpr (HasDataOnly<E>) {
      return E{stack("data", data, indices)};
    } else {
      std::vector<at::Tensor> target;
      for (auto& sample : samples) target.push_back(sample.target);
      return E{stack("data", data, indices), stack("target", target, indices)};
    }
  } else {
    return samples;
  }
}

}  // namespace lockstep::data
