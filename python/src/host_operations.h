// Tensors of torch.distributed as Group takes them: flat, contiguous, and of a dtype that it accepts. Operations of
// c10d on tensors on the CPU that Group does not have, made of those that it has.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "lockstep/comm/group.h"

namespace lockstep::python {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

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

/// A reduction of c10d as one of Group; none for those that Group does not have.
std::optional<comm::ReduceOp> to_reduce_op(const c10d::ReduceOp& op);

/// Throws UsageError unless elements of this dtype can be reduced by `op`: other dtypes move as bytes, and are no
/// numbers.
void check_reducible(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* call);

/// Group's functions of these names, with any reduction that check_reducible() accepts. The tensors are flat and
/// contiguous. The mean of integers is their sum, divided and rounded toward zero, as NCCL does.
void all_reduce(const comm::Group& group, const at::Tensor& line, const c10d::ReduceOp& op,
                const comm::CallOptions& options);
void reduce(const comm::Group& group, const at::Tensor& line, int root, const c10d::ReduceOp& op,
            const comm::CallOptions& options);
void reduce_scatter(const comm::Group& group, const at::Tensor& to, const at::Tensor& from, const c10d::ReduceOp& op,
                    const comm::CallOptions& options);
/// Sums sparse tensors, whose ranks may have different numbers of elements.
void all_reduce_sparse(const comm::Group& group, at::Tensor& tensor, const c10d::ReduceOp& op,
                       const comm::CallOptions& options);
/// all_to_all() of parts of different sizes, in rounds of equal parts of a few MiB, as many as the largest part of all
/// ranks needs. Throws DesyncError if a rank sends another number of elements than its receiver expects.
void all_to_all_unequal(const comm::Group& group, const Tensors& outputs, const Tensors& inputs,
                        const comm::CallOptions& options);

/// The one tensor of a list that c10d passes. Throws UsageError if there are more or fewer.
const at::Tensor& only(const Tensors& tensors, const char* call);
/// The one list, of a tensor for each of `size` ranks.
const Tensors& only(const TensorLists& lists, const char* call, int size);

/// Returns parts of a tensor with these numbers of rows, or with equal ones if `sizes` is empty. Throws UsageError
/// unless there are `parts` numbers whose sum is that of the tensor's rows.
Tensors split_rows(const at::Tensor& tensor, std::vector<std::int64_t> sizes, int parts);

}  // namespace lockstep::python
