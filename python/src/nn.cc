// The autograd function of SyncBatchNorm.
#include <pybind11/stl.h>

#include <optional>

#include "lockstep/nn/sync_batch_norm_function.h"
#include "python/src/bindings.h"

namespace lockstep::python {

void bind_nn(py::module_& module) {
  using MaybeTensor = std::optional<at::Tensor>;
  module.def(
      "sync_batch_norm",
      [](const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& running_mean,
         const MaybeTensor& running_var, double momentum, double eps, const comm::Group& group, std::string name) {
        const auto tensor_of = [](const MaybeTensor& tensor) { return tensor.value_or(at::Tensor()); };
        return nn::apply_sync_batch_norm(input, tensor_of(weight), tensor_of(bias),
                                         {.group = group,
                                          .name = std::move(name),
                                          .running_mean = tensor_of(running_mean),
                                          .running_var = tensor_of(running_var),
                                          .momentum = momentum,
                                          .eps = eps});
      },
      WithoutGil());
}

}  // namespace lockstep::python
