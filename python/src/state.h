// Values of checkpoints from Python.
#pragma once

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/stateful.h"
#include "python/src/bindings.h"

namespace lockstep::python {

/// pybind11 alone would take a tensor of one integer for an integer. Throws UsageError for other types.
inline checkpoint::StateValue state_value(py::handle value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<std::int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
  throw base::UsageError("a value of a state has the type " + py::str(py::type::of(value)).cast<std::string>() +
                         "; expected a bool, a number, a string or a tensor");
}

inline checkpoint::StateDict state_dict(const py::dict& values) {
  checkpoint::StateDict state;
  for (const auto& [name, value] : values) state[name.cast<std::string>()] = state_value(value);
  return state;
}

}  // namespace lockstep::python
