#include "python/src/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ library of Lockstep. Private: use the package lockstep.";
  lockstep::python::bind_errors(module);
  lockstep::python::bind_group(module);
  lockstep::python::bind_backend(module);
  lockstep::python::bind_checkpoint(module);
  lockstep::python::bind_data(module);
  lockstep::python::bind_ddp(module);
  lockstep::python::bind_memory(module);
  lockstep::python::bind_nn(module);
  lockstep::python::bind_optimizers(module);
}
