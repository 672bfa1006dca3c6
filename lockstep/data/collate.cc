#include "lockstep/data/collate.h"

#include <ATen/ops/stack.h>

#include <sstream>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::data {
namespace {

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << tensor.scalar_type() << tensor.sizes();
  return text.str();
}

bool can_stack(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.device() == b.device();
}

}  // namespace

at::Tensor stack(std::string_view what, const std::vector<at::Tensor>& tensors,
                 const std::vector<std::size_t>& indices) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (!can_stack(tensors[0], tensors[i]))
      throw base::UsageError("cannot stack the samples of a batch: " + std::string(what) + " of sample " +
                             std::to_string(indices[0]) + " is " + describe(tensors[0]) + " and of sample " +
                             std::to_string(indices[i]) + " " + describe(tensors[i]) +
                             "; expected equal shapes, dtypes and devices");
  return at::stack(tensors);
}

}  // namespace lockstep::data
