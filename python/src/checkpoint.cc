// The state of a training: training::TrainingState, whose members are Python's.
#include <pybind11/stl.h>

#include <deque>
#include <memory>

#include "lockstep/train/training_state.h"
#include "python/src/bindings.h"
#include "python/src/state.h"

namespace lockstep::python {
namespace {

using checkpoint::StateDict;
using checkpoint::StateValue;
using training::TrainingState;

/// A function of Python that any thread may destroy.
std::shared_ptr<py::function> share(py::function function) {
  return {new py::function(std::move(function)), [](py::function* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

training::StateMember make_member(py::function state_dict, py::function load, bool each_rank, bool optional,
                                  bool hosts_differ) {
  const auto get = share(std::move(state_dict)), set = share(std::move(load));
  return {.state_dict =
              [get] {
                const py::gil_scoped_acquire gil;
                return python::state_dict((*get)().cast<py::dict>());
              },
          .load_state_dict =
              [set](const StateDict& state) {
                const py::gil_scoped_acquire gil;
                (*set)(state);
              },
          .each_rank = each_rank,
          .optional = optional,
          .hosts_differ = hosts_differ};
}

/// A TrainingState and the values that were added to it, which Python reads and writes by name.
class State {
 public:
  State(const comm::Group& world, const std::string& folder, int keep, StateDict settings, std::string resume_from)
      : training_(world, folder,
                  {.keep = keep, .settings = std::move(settings), .resume_from = std::move(resume_from)}) {}

  TrainingState& training() { return training_; }

  void add_value(const std::string& name, StateValue value) {
    StateValue& kept = values_.emplace_back(name, std::move(value)).second;
    try {
      std::visit([&](auto& variable) { training_.add(name, variable); }, kept);
    } catch (...) {
      values_.pop_back();
      throw;
    }
  }
  const StateValue& value(const std::string& name) const {
    for (const auto& [key, value] : values_)
      if (key == name) return value;
    throw base::UsageError("the state has no value \"" + name + "\"; expected one that add() was called with");
  }
  void set_value(const std::string& name, const StateValue& value) {
    auto& now = const_cast<StateValue&>(this->value(name));
    const auto assign = [&]<typename T>(T& variable) {
      if constexpr (std::is_same_v<T, double>) {
        if (const auto* const whole = std::get_if<std::int64_t>(&value)) {
          variable = static_cast<double>(*whole);
          return;
        }
      }
      if (!std::holds_alternative<T>(value))
        throw base::UsageError("\"" + name + "\" was added with a value of another type");
      variable = std::get<T>(value);
    };
    std::visit(assign, now);
  }

 private:
  std::deque<std::pair<std::string, StateValue>> values_;  // at addresses that do not change
  TrainingState training_;
};

/// The members of Python's SaveReport.
auto to_python(const checkpoint::SaveReport& report) {
  return std::tuple(report.path, report.num_bytes, report.stall.count(), report.duration.count());
}

void bind_members(py::class_<State, Holder<State>>& state) {
  state
      .def(py::init([](const comm::Group& world, const std::string& folder, int keep, const py::dict& settings,
                       std::string resume_from) {
        StateDict converted = python::state_dict(settings);
        const py::gil_scoped_release release;
        return Holder<State>(new State(world, folder, keep, std::move(converted), std::move(resume_from)));
      }))
      .def("add_member",
           [](State& self, const std::string& name, py::function state_dict, py::function load, bool each_rank,
              bool optional, bool hosts_differ) {
             training::StateMember member =
                 make_member(std::move(state_dict), std::move(load), each_rank, optional, hosts_differ);
             const py::gil_scoped_release release;
             self.training().add(name, std::move(member));
           })
      .def(
          "add_random_state", [](State& self) { self.training().add_random_state(); }, WithoutGil())
      .def("add_value",
           [](State& self, const std::string& name, py::handle value) {
             StateValue converted = state_value(value);
             const py::gil_scoped_release release;
             self.add_value(name, std::move(converted));
           })
      .def("value", &State::value)
      .def("set_value",
           [](State& self, const std::string& name, py::handle value) { self.set_value(name, state_value(value)); });
}

void bind_saving(py::class_<State, Holder<State>>& state) {
  state
      .def(
          "resume",
          [](State& self, bool allow_unknown, bool train_on) {
            return self.training().resume({.allow_unknown = allow_unknown, .train_on = train_on});
          },
          WithoutGil())
      .def(
          "save",
          [](State& self, std::int64_t step, bool finished) {
            return to_python(self.training().save(step, {.finished = finished}));
          },
          WithoutGil())
      .def(
          "save_async",
          [](State& self, std::int64_t step, bool finished) {
            self.training().save_async(step, {.finished = finished});
          },
          WithoutGil())
      .def("in_flight", [](State& self) { return self.training().in_flight(); })
      .def(
          "wait",
          [](State& self) {
            const auto report = self.training().wait();  // bounded: by the timeouts of the group and by the disk
            return report ? std::optional(to_python(*report)) : std::nullopt;
          },
          WithoutGil());
}

void bind_queries(py::class_<State, Holder<State>>& state) {
  state
      .def("path",
           [](State& self) -> std::optional<std::string> {
             const auto& found = self.training().found();
             return found ? std::optional(found->path()) : std::nullopt;
           })
      .def("step", [](State& self) { return self.training().step(); })
      .def("is_finished", [](State& self) { return self.training().is_finished(); })
      .def(
          "unknown_parts", [](State& self) { return self.training().unknown_parts(); }, WithoutGil())
      .def(
          "bucket_layout", [](State& self, const std::string& name) { return self.training().bucket_layout(name); },
          WithoutGil())
      .def(
          "read", [](State& self, const std::string& name, int rank) { return self.training().read(name, rank); },
          WithoutGil());
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  py::class_<State, Holder<State>> state(module, "TrainingState");
  bind_members(state);
  bind_saving(state);
  bind_queries(state);
}

}  // namespace lockstep::python
