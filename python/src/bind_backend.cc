// The Python side of the backend for torch.distributed.
#include <ATen/ops/zeros.h>

#include "lockstep/comm/group_access.h"
#include "python/src/backend.h"
#include "python/src/bindings.h"

namespace lockstep::python {
namespace {

using comm::Group;
using comm::ReduceOp;
using std::chrono::milliseconds;

/// The backends of this process, for close_backends(). Guarded by the GIL.
std::vector<c10::weak_intrusive_ptr<LockstepBackend>>& backends() {
  static auto* const all = new std::vector<c10::weak_intrusive_ptr<LockstepBackend>>;  // never destroyed
  return *all;
}

/// Ends the groups that the program has not destroyed.
void close_backends() {
  for (const auto& reference : std::exchange(backends(), {})) {
    const auto backend = reference.lock();
    const py::gil_scoped_release release;
    if (backend) backend->shutdown();
  }
}

/// Throws UsageError unless all ranks have a backend for a device, or none.
void check_all_have_device(const Group& group, bool mine) {
  const at::Tensor counts = at::zeros({2}, at::kInt);
  counts[mine ? 1 : 0] = 1;
  group.all_reduce(counts, ReduceOp::kMax);
  if (counts.sum().item<int>() > 1)
    throw base::UsageError("some ranks of this process group have a GPU that NCCL can use, and others have none");
}

}  // namespace

void bind_backend(py::module_& module) {
  py::class_<LockstepBackend, c10d::Backend, c10::intrusive_ptr<LockstepBackend>>(module, "ProcessGroupLockstep")
      .def("device_backend", &LockstepBackend::device_backend)
      .def("count_optimizer_step", &LockstepBackend::count_optimizer_step)
      .def("stop_counting_steps", &LockstepBackend::stop_counting_steps)
      .def("allreduce_rounded", &LockstepBackend::allreduce_rounded, py::call_guard<py::gil_scoped_release>())
      // torch calls it on the ranks that a group made by splitting leaves out.
      .def("perform_nocolor_split", [](const LockstepBackend& self, const at::Device& device) {
        py::cast(self.device_backend()).attr("perform_nocolor_split")(device);
      });
  module.def("make_backend",
             [](const Group& world, std::string name, std::vector<int> members, double timeout,
                const std::optional<std::string>& device,
                c10::intrusive_ptr<c10d::Backend> inner) -> c10::intrusive_ptr<c10d::Backend> {
               c10::intrusive_ptr<LockstepBackend> made;
               {
                 const py::gil_scoped_release release;
                 Group group = comm::GroupAccess::make_group(world, name, members);
                 check_all_have_device(group, device.has_value());
                 made = c10::make_intrusive<LockstepBackend>(std::move(group),
                                                             milliseconds(static_cast<std::int64_t>(timeout * 1e3)));
                 if (device)
                   made->set_device(c10::Device(*device).type(),
                                    comm::GroupAccess::make_group(world, name + ".device", members), std::move(inner));
               }
               std::erase_if(backends(), [](const auto& backend) { return backend.expired(); });
               backends().emplace_back(made);
               return made;
             });
  module.def("close_backends", close_backends);
}

}  // namespace lockstep::python
