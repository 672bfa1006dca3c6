// Tensors of torch.distributed as Group takes them: flat, contiguous, and of a dtype that it accepts.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace lockstep::python {

/// Returns the elements of `tensor` as a tensor of one dimension, a copy if it is not contiguous. Complex
/// numbers become their real and imaginary parts, and elements of other dtypes that Group does not accept, such as
/// int16, become bytes.
at::Tensor flat(const at::Tensor& tensor);

/// A tensor that receives the result of an operation.
class FlatResult {
 public:
  explicit FlatResult(const at::Tensor& tensor) : tensor_(tensor), flat_(flat(tensor)) {}
  const at::Tensor& flat_tensor() const { return flat_; }
  /// Copies the result to the tensor, if it is not there.
  void finish() const;

 private:
  at::Tensor tensor_;
  at::Tensor flat_;
};

/// Several tensors of one dtype, one after another in one flat tensor.
class Concatenated {
 public:
  /// Throws UsageError if a tensor has another dtype, or another number of elements if `are_equal`.
  Concatenated(const char* call, std::vector<at::Tensor> tensors, bool are_equal);
  const at::Tensor& flat_tensor() const { return flat_; }
  void copy_from_tensors();
  void copy_to_tensors() const;

 private:
  std::vector<at::Tensor> tensors_;
  at::Tensor flat_;
};

}  // namespace lockstep::python
