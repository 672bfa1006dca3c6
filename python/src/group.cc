// init(), Group and Work.
#include "lockstep/comm/group.h"

#include <pybind11/stl.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <optional>

#include "lockstep/base/telemetry/comm_time.h"
#include "lockstep/comm/arena/arena_stats.h"
#include "lockstep/comm/group_access.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/stop_signal.h"
#include "python/src/bindings.h"
#include "python/src/host_operations.h"

namespace lockstep::python {
namespace {

using comm::CallOptions;
using comm::Group;
using comm::GroupAccess;
using comm::ReduceOp;
using comm::Work;

using Seconds = std::optional<double>;

std::optional<std::chrono::milliseconds> to_milliseconds(const std::string& name, Seconds seconds) {
  if (!seconds) return std::nullopt;
  base::check_option(*seconds >= 0 && *seconds < 1e9, "lockstep", name, *seconds, "seconds, 0 or more");
  return std::chrono::milliseconds(static_cast<std::int64_t>(*seconds * 1e3));
}

/// The options that every operation has, as they come from Python.
CallOptions call_options(std::string name, Seconds timeout, at::ScalarType wire_dtype = at::kFloat) {
  CallOptions options{.name = std::move(name), .wire_dtype = wire_dtype};
  if (const auto limit = to_milliseconds("timeout", timeout)) options.deadline = base::Deadline::in(*limit);
  return options;
}

/// The options of init() without those that say who the rank is.
comm::InitOptions init_options(std::string transport, std::string device, std::string cross_host_transport,
                               std::optional<bool> arena, Seconds join_timeout, Seconds timeout) {
  return {.transport = std::move(transport),
          .device = std::move(device),
          .cross_host_transport = std::move(cross_host_transport),
          .arena = arena,
          .join_timeout = to_milliseconds("join_timeout", join_timeout),
          .timeout = to_milliseconds("timeout", timeout)};
}

Group init(std::optional<int> rank, std::optional<int> world_size, std::string address, std::string env_from,
           std::string transport, std::string device, std::string cross_host_transport, std::optional<bool> arena,
           Seconds join_timeout, Seconds timeout) {
  comm::InitOptions options = init_options(std::move(transport), std::move(device), std::move(cross_host_transport),
                                           arena, join_timeout, timeout);
  options.rank = rank;
  options.world_size = world_size;
  options.address = std::move(address);
  options.env_from = std::move(env_from);
  return comm::init(options);
}

/// init() of ranks that torch.distributed has numbered. `exchange` gets what rank 0 sends, and the seconds left.
Group init_over(int rank, int size, std::string towards, py::function exchange, std::string transport,
                std::string device, std::string cross_host_transport, std::optional<bool> arena, Seconds join_timeout,
                Seconds timeout) {
  comm::ExternalRendezvous rendezvous{.rank = rank, .world_size = size, .towards = std::move(towards)};
  rendezvous.exchange = [&exchange](const std::string& text, base::Deadline deadline) {
    const double seconds = std::chrono::duration<double>(deadline.remaining()).count();
    const py::gil_scoped_acquire gil;
    return std::string(exchange(py::bytes(text), seconds).cast<py::bytes>());
  };
  const py::gil_scoped_release release;
  return comm::init(init_options(std::move(transport), std::move(device), std::move(cross_host_transport), arena,
                                 join_timeout, timeout),
                    rendezvous);
}

using PyGroup = py::class_<Group, Holder<Group>>;

/// What functions of Group get for an argument of Python.
template <typename Argument>
const Argument& to_cpp(const Argument& argument) {
  return argument;
}
at::Tensor to_cpp(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

/// Binds a function of a Group, `Arguments` and CallOptions, which may be a member of Group.
template <typename... Arguments, typename Function>
void bind_call(PyGroup& group, const std::string& name, Function function) {
  group.def(
      name.c_str(),
      [function](const Group& self, Arguments... arguments, std::string call, Seconds timeout) {
        return std::invoke(function, self, to_cpp(arguments)..., call_options(std::move(call), timeout));
      },
      WithoutGil());
}

/// Binds an operation and its `_async`.
template <typename... Arguments, typename Sync, typename Async>
void bind_operation(PyGroup& group, const std::string& name, Sync sync, Async async) {
  bind_call<Arguments...>(group, name, sync);
  bind_call<Arguments...>(group, name + "_async", async);
}

template <typename Function>
void bind_all_reduce(PyGroup& group, const char* name, Function function) {
  group.def(
      name,
      [function](const Group& self, const at::Tensor& tensor, ReduceOp op, std::string call, Seconds timeout,
                 at::ScalarType wire_dtype) {
        return (self.*function)(tensor, op, call_options(std::move(call), timeout, wire_dtype));
      },
      WithoutGil());
}

/// Calls `gather` without the GIL.
std::vector<py::bytes> to_python(const std::function<std::vector<std::string>()>& gather) {
  std::vector<std::string> found;
  {
    const py::gil_scoped_release release;
    found = gather();
  }
  return {found.begin(), found.end()};
}

void bind_bytes(PyGroup& group) {
  group
      .def("broadcast_bytes",
           [](const Group& self, const py::bytes& bytes, int root, std::string name, Seconds timeout) {
             std::string found(bytes);
             {
               const py::gil_scoped_release release;
               found = self.broadcast_bytes(found, root, call_options(std::move(name), timeout));
             }
             return py::bytes(found);
           })
      .def("leave_value",
           [](const Group& self, const py::bytes& value) {
             const std::string text(value);
             return to_python([&] { return GroupAccess::leave_value(self, GroupAccess::new_value_key(self), text); });
           })
      .def(
          "all_gather_bytes",
          [](const Group& self, const py::bytes& bytes, std::string name, Seconds timeout, const std::string& hint) {
            const std::string text(bytes);
            CallOptions options = call_options(std::move(name), timeout);
            options.hint = hint;
            return to_python([&] { return self.all_gather_bytes(text, options); });
          },
          py::arg("bytes"), py::arg("name"), py::arg("timeout"), py::arg("hint") = "");
}

void bind_operations(PyGroup& group) {
  bind_bytes(group);
  using Tensor = const at::Tensor&;
  using MaybeTensor = const std::optional<at::Tensor>&;  // on one rank only
  bind_all_reduce(group, "all_reduce", &Group::all_reduce);
  bind_all_reduce(group, "all_reduce_async", &Group::all_reduce_async);
  bind_operation<Tensor, int, ReduceOp>(group, "reduce", &Group::reduce, &Group::reduce_async);
  bind_operation<Tensor, Tensor, ReduceOp>(group, "reduce_scatter", &Group::reduce_scatter,
                                           &Group::reduce_scatter_async);
  bind_operation<Tensor, int>(group, "broadcast", &Group::broadcast, &Group::broadcast_async);
  bind_operation<Tensor, int>(group, "send", &Group::send, &Group::send_async);
  bind_operation<Tensor, int>(group, "recv", &Group::recv, &Group::recv_async);
  bind_operation<Tensor, Tensor>(group, "all_gather", &Group::all_gather, &Group::all_gather_async);
  bind_operation<Tensor, Tensor>(group, "all_to_all", &Group::all_to_all, &Group::all_to_all_async);
  bind_operation<MaybeTensor, MaybeTensor, int>(group, "gather", &Group::gather, &Group::gather_async);
  bind_operation<MaybeTensor, MaybeTensor, int>(group, "scatter", &Group::scatter, &Group::scatter_async);
  bind_operation<>(group, "barrier", &Group::barrier, &Group::barrier_async);
  bind_call<Tensor>(group, "all_gather_unequal", &Group::all_gather_unequal);
  bind_call<const Tensors&, const Tensors&>(group, "all_to_all_unequal", all_to_all_unequal);
  bind_call<Tensor>(group, "recv_any", &Group::recv_any);
}

}  // namespace

void bind_group(py::module_& module) {
  py::enum_<ReduceOp>(module, "ReduceOp")
      .value("sum", ReduceOp::kSum)
      .value("mean", ReduceOp::kMean)
      .value("product", ReduceOp::kProduct)
      .value("min", ReduceOp::kMin)
      .value("max", ReduceOp::kMax);
  py::class_<Work>(module, "Work")
      .def(
          "wait",
          [](Work& self, Seconds timeout) {
            const auto limit = to_milliseconds("timeout", timeout);
            // bounded: without a limit here, the deadline of the operation or of init() ends it
            limit ? self.wait(base::Deadline::in(*limit)) : self.wait();
          },
          py::arg("timeout") = py::none(), WithoutGil())
      .def("done", &Work::done);
  py::class_<comm::BusyScope>(module, "BusyScope");
  PyGroup group(module, "Group");
  group.def("rank", &Group::rank)
      .def("size", &Group::size)
      .def("global_rank", &Group::global_rank)
      .def("local_rank", &Group::local_rank)
      .def("local_size", &Group::local_size)
      .def("node_rank", &Group::node_rank)
      .def("num_nodes", &Group::num_nodes)
      .def("device", &Group::device)
      .def("name", &Group::name)
      .def("transport", [](const Group& self) { return std::string(self.transport()); })
      .def("split", &Group::split, WithoutGil())
      .def("split_by_host", &Group::split_by_host, WithoutGil())
      .def("step", &Group::step, WithoutGil())
      .def("steps", &Group::steps)
      .def("comm_seconds",
           [](const Group&) { return static_cast<double>(base::telemetry::CommTime::total_ns()) / 1e9; })
      .def("alive", &Group::alive)
      .def("busy", [](const Group&, const std::string& what) { return std::make_unique<comm::BusyScope>(what); })
      .def("stop_requested", [](const Group& self) {
        static const bool once = [] {
          const py::module_ signals = py::module_::import("signal");
          const bool is_default = signals.attr("getsignal")(SIGINT).is(signals.attr("default_int_handler"));
          comm::install_stop_signal_handlers(is_default);
          return true;
        }();
        (void)once;
        return self.stop_requested();
      });
  bind_operations(group);
  module.def("init", init, WithoutGil());
  module.def("init_over", init_over);
}

}  // namespace lockstep::python
