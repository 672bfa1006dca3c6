#include "python/src/flat.h"

#include <ATen/ops/empty.h>

#include <string>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/collective.h"

namespace lockstep::python {
namespace {

at::Tensor as_accepted(const at::Tensor& line) {
  at::ScalarType dtype = at::toRealValueType(line.scalar_type());
  if (comm::name(dtype) == "?") dtype = at::kByte;
  return dtype == line.scalar_type() ? line : line.view(dtype);
}

}  // namespace

at::Tensor flat(const at::Tensor& tensor) { return as_accepted(tensor.contiguous().view({-1})); }

void FlatResult::finish() const {
  if (tensor_.is_contiguous()) return;  // flat() has made a view
  const at::Tensor line = flat_.scalar_type() == tensor_.scalar_type() ? flat_ : flat_.view(tensor_.scalar_type());
  tensor_.copy_(line.view(tensor_.sizes()));
}

Concatenated::Concatenated(const char* call, std::vector<at::Tensor> tensors, bool are_equal)
    : tensors_(std::move(tensors)) {
  std::int64_t count = 0;
  for (const at::Tensor& tensor : tensors_) {
    if (tensor.scalar_type() != tensors_[0].scalar_type() || (are_equal && tensor.numel() != tensors_[0].numel()))
      throw base::UsageError(std::string(call) + ": the list has " + comm::describe(tensors_[0]) + " and " +
                             comm::describe(tensor) + "; expected equal dtypes" +
                             (are_equal ? " and numbers of elements" : ""));
    count += tensor.numel();
  }
  flat_ = as_accepted(
      at::empty({count}, tensors_.empty() ? at::TensorOptions() : tensors_[0].options().memory_format(std::nullopt)));
}

void Concatenated::copy_from_tensors() {
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors_) {
    const at::Tensor line = flat(tensor);
    flat_.narrow(0, at, line.numel()).copy_(line);
    at += line.numel();
  }
}

void Concatenated::copy_to_tensors() const {
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors_) {
    const FlatResult result(tensor);
    result.flat_tensor().copy_(flat_.narrow(0, at, result.flat_tensor().numel()));
    result.finish();
    at += result.flat_tensor().numel();
  }
}

}  // namespace lockstep::python
