// Visits the tensors of a batch of any type.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <ranges>
#include <tuple>
#include <type_traits>

namespace lockstep::data {

using TensorVisitor = std::function<void(at::Tensor& tensor)>;

/// Calls `visit` with each tensor in `value`: a tensor, the members `data` and `target` of a struct, the elements of
/// containers, pairs, tuples and optionals, and recursively the tensors inside these. Your own types with other members
/// can provide a member function for_each_tensor(visit). Const values and all other types are skipped.
template <typename T>
void visit_tensors(T& value, const TensorVisitor& visit) {
  if constexpr (std::is_const_v<T>) {
    return;
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(value);
  } else if constexpr (requires { value.for_each_tensor(visit); }) {
    value.for_each_tensor(visit);
  } else if constexpr (std::ranges::range<T>) {
    if constexpr (!std::is_arithmetic_v<std::ranges::range_value_t<T>>)
      for (auto&& element : value) visit_tensors(element, visit);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](auto&... part) { (visit_tensors(part, visit), ...); }, value);
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) visit_tensors(*value, visit);
  } else {
    if constexpr (requires { value.data; }) visit_tensors(value.data, visit);
    if constexpr (requires { value.target; }) visit_tensors(value.target, visit);
  }
}

}  // namespace lockstep::data
