// DistributedDataParallel, and the beginning and end of backward() calls that Python makes.
#include "lockstep/ddp/ddp.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

#include "lockstep/ddp/backward.h"
#include "lockstep/ddp/gradient_source.h"
#include "lockstep/ddp/hooks/bf16_compress_hook.h"
#include "lockstep/ddp/hooks/int8_hook.h"
#include "lockstep/ddp/hooks/power_sgd_hook.h"
#include "lockstep/ddp/outer/host_averager.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/job/join.h"
#include "python/src/bindings.h"
#include "python/src/state.h"

namespace lockstep::python {
namespace {

using ddp::DistributedDataParallel;

/// Notices that a tensor of a module was added, removed or replaced, or has got another dtype, size or device, in
/// nanoseconds per tensor. Used with the GIL.
class ModuleDicts {
 public:
  /// From now on, compares with the present entries of `dicts`: _parameters, _buffers and _modules of a module and of
  /// all modules in it.
  void watch(std::vector<py::dict> dicts) {
    dicts_.clear();
    for (py::dict& dict : dicts) {
      Known known{.dict = dict, .entries = {}};
      for (const auto& [key, value] : dict) {
        Entry entry{.value = py::reinterpret_borrow<py::object>(value), .tensor = {}, .options = {}, .sizes = {}};
        if (THPVariable_Check(value.ptr())) {
          entry.tensor = THPVariable_Unpack(value.ptr());
          entry.options = entry.tensor.options();
          entry.sizes = entry.tensor.sizes().vec();
        }
        known.entries.push_back(std::move(entry));
      }
      dicts_.push_back(std::move(known));
    }
  }

  /// Whether a tensor or module has changed since watch().
  bool have_changed() const { return !std::all_of(dicts_.begin(), dicts_.end(), is_same); }

 private:
  struct Entry {
    py::object value;  // kept alive, so that no other object can have its address
    at::Tensor tensor;
    at::TensorOptions options;
    std::vector<std::int64_t> sizes;
  };
  struct Known {
    py::dict dict;
    std::vector<Entry> entries;
  };

  static bool is_same(const Known& known) {
    if (static_cast<std::size_t>(PyDict_Size(known.dict.ptr())) != known.entries.size()) return false;
    Py_ssize_t position = 0;
    PyObject* value = nullptr;
    for (std::size_t i = 0; PyDict_Next(known.dict.ptr(), &position, nullptr, &value); ++i) {
      const Entry& entry = known.entries[i];
      if (value != entry.value.ptr()) return false;
      if (!entry.tensor.defined()) continue;
      const bool same_options =
          entry.tensor.dtype() == entry.options.dtype() && entry.tensor.device() == entry.options.device();
      if (!same_options || entry.tensor.sizes() != at::IntArrayRef(entry.sizes)) return false;
    }
    return true;
  }

  std::vector<Known> dicts_;
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

ddp::Payload payload_of(const std::string& name) {
  constexpr std::pair<std::string_view, ddp::Payload> kPayloads[] = {{"float32", ddp::Payload::kFloat32},
                                                                     {"bfloat16", ddp::Payload::kBFloat16},
                                                                     {"int8", ddp::Payload::kInt8},
                                                                     {"int4", ddp::Payload::kInt4}};
  for (const auto& [known, payload] : kPayloads)
    if (known == name) return payload;
  throw base::UsageError("DiLoCo: payload is \"" + name +
                         "\"; expected \"float32\", \"bfloat16\", \"int8\" or \"int4\"");
}

/// lockstep.DiLoCo, lockstep.SparseLoCo or None.
ddp::OuterMethod outer_method(const py::object& options) {
  const auto read = [&]<typename Method>(Method method) -> ddp::OuterMethod {
    ddp::visit_outer(method, [&]<typename Value>(const char* name, Value& value) {
      if constexpr (std::is_same_v<Value, ddp::Payload>)
        value = payload_of(options.attr(name).cast<std::string>());
      else
        value = options.attr(name).cast<Value>();
    });
    return method;
  };
  if (options.is_none()) return {};
  return py::hasattr(options, "payload") ? read(ddp::DiLoCo()) : read(ddp::SparseLoCo());
}

std::shared_ptr<comm::GradientHook> hook_of(bool bf16_compress, const py::object& hook) {
  if (!hook.is_none()) return hook.cast<std::shared_ptr<comm::GradientHook>>();
  return bf16_compress ? std::make_shared<ddp::Bf16CompressHook>() : nullptr;
}

template <typename Hook>
py::class_<Hook, std::shared_ptr<Hook>, comm::GradientHook> bind_hook(py::module_& module, const char* name) {
  return py::class_<Hook, std::shared_ptr<Hook>, comm::GradientHook>(module, name)
      .def("state_dict", &Hook::state_dict)
      .def("load_state_dict", [](Hook& self, const py::dict& values) { self.load_state_dict(state_dict(values)); });
}

ddp::DdpOptions ddp_options(const py::dict& values) {
  const auto buffers = values["buffers"].cast<std::string>();
  if (buffers != "broadcast" && buffers != "mean" && buffers != "local")
    throw base::UsageError("DistributedDataParallel: buffers is \"" + buffers +
                           "\"; expected \"broadcast\", \"mean\" or \"local\"");
  ddp::DdpOptions options;
  ddp::visit_options(options, [&]<typename Value>(const char* name, Value& value) {
    if constexpr (std::is_same_v<Value, ddp::BufferMode>)
      value = buffers == "broadcast" ? ddp::BufferMode::kBroadcast
              : buffers == "mean"    ? ddp::BufferMode::kMean
                                     : ddp::BufferMode::kLocal;
    else if constexpr (std::is_same_v<Value, std::shared_ptr<comm::GradientHook>>)
      value = hook_of(values["bf16_compress"].cast<bool>(), values["hook"]);
    else if constexpr (std::is_same_v<Value, ddp::OuterMethod>)
      value = outer_method(values[name]);
    else
      value = values[name].cast<Value>();
  });
  return options;
}

Holder<DistributedDataParallel> make_ddp(NamedTensors parameters, NamedTensors buffers, const comm::Group& group,
                                         const py::dict& options, bool broadcast) {
  ddp::DdpOptions converted = ddp_options(options);
  const py::gil_scoped_release release;
  return Holder<DistributedDataParallel>(new DistributedDataParallel(
      ddp::ModelTensors{.parameters = std::move(parameters), .buffers = std::move(buffers), .broadcast = broadcast},
      group, std::move(converted)));
}

std::shared_ptr<ddp::GradientSource> source_of(const DistributedDataParallel& model) { return model; }

/// Runs run(), which calls torch's engine on `roots`, with the hooks of DistributedDataParallel around it.
py::object run_backward(const std::vector<at::Tensor>& roots, const py::function& run) {
  torch::autograd::edge_list edges;
  for (const at::Tensor& root : roots)
    if (root.defined() && root.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(root));
  py::object result;
  const py::gil_scoped_release release;
  ddp::watch_backward(edges, [&] {
    const py::gil_scoped_acquire gil;
    result = run();
  });
  return result;
}

/// `exchange` has the members of HostExchange; its functions are None where those may be null.
/// Or with a Group instead, whose hosts these are; then a collective of its ranks.
ddp::HostAverager make_host_averager(int period, const py::object& outer, const py::object& exchange) {
  const auto store = [](const at::Tensor& values, const at::Tensor& tensor) { tensor.copy_(values); };
  if (py::isinstance<comm::Group>(exchange)) {
    const auto& group = exchange.cast<const comm::Group&>();
    ddp::OuterMethod method = outer_method(outer);
    const py::gil_scoped_release release;
    return {period, std::move(method), ddp::HostLink(group).exchange(at::kFloat), store};
  }
  ddp::HostExchange converted{.num_hosts = exchange.attr("num_hosts").cast<int>(),
                              .host = exchange.attr("host").cast<int>(),
                              .weights = exchange.attr("weights").cast<std::vector<float>>(),
                              .num_slices = exchange.attr("num_slices").cast<int>(),
                              .slice = exchange.attr("slice").cast<int>()};
  const auto function_of = [&](const char* name) -> std::optional<py::function> {
    const py::object function = exchange.attr(name);
    return function.is_none() ? std::nullopt : std::optional(function.cast<py::function>());
  };
  if (const auto average = function_of("average"))
    converted.average = [call = *average](const at::Tensor& flat, bool equal_on_host) { call(flat, equal_on_host); };
  if (const auto share = function_of("share"))
    converted.share = [call = *share](const at::Tensor& flat) { call(flat); };
  const auto start = [&](const char* name) -> decltype(converted.all_gather) {
    const auto function = function_of(name);
    if (!function) return nullptr;
    return [call = *function](const at::Tensor& output, const at::Tensor& input) -> ddp::HostExchange::Wait {
      return [wait = call(output, input)] { wait(); };
    };
  };
  converted.all_to_all = start("all_to_all");
  converted.all_gather = start("all_gather");
  return {period, outer_method(outer), std::move(converted), store};
}

py::dict to_python(const comm::ReducerStats& stats) {
  return py::dict(py::arg("in_place") = stats.in_place, py::arg("reductions") = stats.reductions,
                  py::arg("operations") = stats.operations, py::arg("bytes") = stats.bytes,
                  py::arg("copies_in") = stats.copies_in, py::arg("copies_out") = stats.copies_out,
                  py::arg("started_early") = stats.started_early, py::arg("bucket_bytes") = stats.bucket_bytes,
                  py::arg("order") = stats.order, py::arg("layout") = stats.layout);
}

}  // namespace

void bind_ddp(py::module_& module) {
  py::class_<DistributedDataParallel::NoSync>(module, "NoSync");
  py::class_<DistributedDataParallel, Holder<DistributedDataParallel>>(module, "DistributedDataParallel")
      .def(py::init(&make_ddp))
      .def("no_sync",
           [](DistributedDataParallel& self) { return std::make_unique<DistributedDataParallel::NoSync>(self); })
      .def("replace_buffer", &DistributedDataParallel::replace_buffer)
      .def("average_hosts", &DistributedDataParallel::average_hosts, WithoutGil())
      .def("with_global_copy",
           [](DistributedDataParallel& self, const py::function& body) {
             const py::gil_scoped_release release;
             self.with_global_copy([&] {
               const py::gil_scoped_acquire gil;
               body();
             });
           })
      .def("hosts_differ", &DistributedDataParallel::hosts_differ)
      .def("outer_state", &DistributedDataParallel::outer_state, WithoutGil())
      .def("load_outer_state",
           [](DistributedDataParallel& self, const py::dict& values) {
             const checkpoint::StateDict state = state_dict(values);
             const py::gil_scoped_release release;
             self.load_outer_state(state);
           })
      .def("compare_replicas", &DistributedDataParallel::compare_replicas, WithoutGil())
      .def("count_optimizer_step", &DistributedDataParallel::count_optimizer_step)
      .def("num_backwards", [](const DistributedDataParallel& self) { return source_of(self)->num_backwards(); })
      .def("has_local_gradients",
           [](const DistributedDataParallel& self) { return source_of(self)->has_local_gradients(); })
      .def(
          "on_step_end", [](const DistributedDataParallel& self) { source_of(self)->on_step_end(); }, WithoutGil())
      .def("belongs_to_this_thread",
           [](const DistributedDataParallel& self) {
             const auto source = source_of(self);
             return ddp::belongs_to_this_thread(dynamic_cast<const ddp::BackwardParticipant*>(source.get()));
           })
      .def("stats", [](const DistributedDataParallel& self) { return to_python(self.stats()); });
  py::class_<ModuleDicts>(module, "ModuleDicts")
      .def(py::init())
      .def("watch", &ModuleDicts::watch)
      .def("have_changed", &ModuleDicts::have_changed);
  py::class_<ddp::HostAverager>(module, "HostAverager")
      .def(py::init(&make_host_averager))
      .def("count_reduction", &ddp::HostAverager::count_reduction)
      .def("is_due", &ddp::HostAverager::is_due)
      .def("must_begin", &ddp::HostAverager::must_begin)
      // The following call functions of Python.
      .def("begin", &ddp::HostAverager::begin)
      .def("average", &ddp::HostAverager::average)
      .def("swap_in_copy", &ddp::HostAverager::swap_in_copy)
      .def("put_back", &ddp::HostAverager::put_back)
      .def("state_dict", &ddp::HostAverager::state_dict)
      .def("load_state_dict",
           [](ddp::HostAverager& self, const py::dict& values, const std::vector<at::Tensor>& parameters) {
             self.load_state_dict(state_dict(values), parameters);
           });
  py::class_<comm::GradientHook, std::shared_ptr<comm::GradientHook>>(module, "GradientHook");
  bind_hook<ddp::PowerSgdHook>(module, "PowerSgdHook").def(py::init([](int rank, int dense_steps) {
    return std::make_shared<ddp::PowerSgdHook>(ddp::PowerSgdOptions{.rank = rank, .dense_steps = dense_steps});
  }));
  bind_hook<ddp::Int8Hook>(module, "Int8Hook").def(py::init<>());
  module.def("host_id", job::host_id);
  module.def("run_backward", run_backward);
  module.def("in_backward", [] { return ddp::Backward::current() != nullptr; });
  module.def(
      "broadcast_tensors",
      [](const NamedTensors& tensors, const comm::Group& group, int root) {
        ddp::broadcast_tensors(tensors, group, root);
      },
      WithoutGil());
  module.def("join", [](const std::vector<DistributedDataParallel*>& models, const py::function& loop,
                        bool by_initial_world_size) {
    const py::gil_scoped_release release;
    return ddp::join(models,
                     [&] {
                       const py::gil_scoped_acquire gil;
                       loop();
                     },
                     {.divide_by_initial_world_size = by_initial_world_size});
  });
}

}  // namespace lockstep::python
