// The tensors of a batch, whatever its type.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <ranges>
#include <tuple>
#include <type_traits>

namespace lockstep::data {

using SeeTensor = std::function<void(at::Tensor& tensor)>;

/// Calls `see` with each tensor in `value`: a tensor, a struct's members `data` and `target`, elements of containers,
/// pairs, tuples and optionals, and so on inside these. A type of your own with other members has a function
/// for_each_tensor(see). What is const, and everything else, is passed over.
template <typename T>
void each_tensor(T& value, const SeeTensor& see) {
  if constexpr (std::is_const_v<T>) {
    return;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    see(value);
  } else if constexpr (requires { value.for_each_tensor(see); }) {
    value.for_each_tensor(see);
  } else if constexpr (std::ranges::range<T>) {
    if constexpr (!std::is_arithmetic_v<std::ranges::range_value_t<T>>)
      for (auto&& element : value) each_tensor(element, see);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](auto&... part) { (each_tensor(part, see), ...); }, value);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) each_tensor(*value, see);
  } else {
    if constexpr (requires { value.data; }) each_tensor(value.data, see);
    if constexpr (requires { value.target; }) each_tensor(value.target, see);
  }
}

}  // namespace lockstep::data
