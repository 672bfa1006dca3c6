// The extension lockstep._C: what the Python package needs of the C++ library. Its interface is private to the package,
// whose modules in python/lockstep are the public one.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::python {

namespace py = pybind11;

/// Makes C++ exceptions those of lockstep/errors.py, and lets Ctrl-C end waits.
void bind_errors(py::module_& module);
void bind_group(py::module_& module);
void bind_backend(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_data(py::module_& module);
void bind_ddp(py::module_& module);
void bind_memory(py::module_& module);
void bind_nn(py::module_& module);
void bind_optimizers(py::module_& module);

/// Functions of the library block without the GIL, so that other threads of the program can run.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

/// Holds an object whose destructor may wait for other ranks.
struct DeleteWithoutGil {
  template <typename T>
  void operator()(T* object) const {
    const py::gil_scoped_release release;
    delete object;
  }
};
template <typename T>
using Holder = std::unique_ptr<T, DeleteWithoutGil>;

}  // namespace lockstep::python
