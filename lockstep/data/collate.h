// Combines samples into a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <string_view>
#include <type_traits>
#include <vector>

namespace lockstep::data {

/// A sample, or a batch of samples: the type that Lockstep's datasets return. Your own datasets may use any type with
/// the same two members.
struct Example {
  at::Tensor data;
  at::Tensor target;
};

/// Stacks tensors of one shape and dtype along a new first dimension. Throws UsageError if shapes, dtypes or devices
/// differ; the message names `what` ("data"), both samples by their entries in `indices`, and both shapes and dtypes.
at::Tensor stack(std::string_view what, const std::vector<at::Tensor>& tensors,
                 const std::vector<std::size_t>& indices);

// These types have no other members, because a batch would drop them.
template <typename E>
concept HasDataOnly = sizeof(E) == sizeof(at::Tensor) && requires(E e) {
  { e.data } -> std::same_as<at::Tensor&>;
};
template <typename E>
concept HasDataAndTarget = sizeof(E) == 2 * sizeof(at::Tensor) && requires(E e) {
  { e.data } -> std::same_as<at::Tensor&>;
  { e.target } -> std::same_as<at::Tensor&>;
};

/// The type of a batch of samples of type E. If E consists of the tensors `data` and `target` only
/// (torch::data::Example<>, data::Example), the batch is an E of stacked tensors [batch, ...]. The same holds for
/// `data` alone (torch::data::TensorExample). A batch of plain tensors is a tensor; for any other type it is a
/// std::vector<E>.
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
