// Exceptions and interrupts.
#include <regex>

#include "lockstep/comm/channel/interrupt.h"
#include "lockstep/comm/uncaught_exception.h"
#include "lockstep/job/python_exception.h"
#include "python/src/bindings.h"

namespace lockstep::python {
namespace {

/// What a signal handler of Python has raised during a wait, until the wait's error reaches Python. Guarded by the GIL.
py::object& pending_interrupt() {
  static auto* const exception = new py::object;  // never destroyed: Python may have ended before
  return *exception;
}

/// Runs Python's signal handlers, if this is Python's main thread.
bool is_interrupted() {
  if (!Py_IsInitialized()) return false;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  py::error_already_set raised;
  pending_interrupt() = raised.value();
  return true;
}

const char* class_name(const base::Error& error) {
  if (dynamic_cast<const base::DesyncError*>(&error)) return "DesyncError";
  if (dynamic_cast<const base::TimeoutError*>(&error)) return "TimeoutError";
  if (dynamic_cast<const base::PeerLostError*>(&error)) return "PeerLostError";
  if (dynamic_cast<const base::CommError*>(&error)) return "CommError";
  if (dynamic_cast<const base::UsageError*>(&error)) return "UsageError";
  if (dynamic_cast<const base::FormatError*>(&error)) return "FormatError";
  if (dynamic_cast<const base::SystemError*>(&error)) return "SystemError";
  return "Error";
}

void raise(const base::Error& error) {
  if (error.cause() == base::Cause::kInterrupted && pending_interrupt()) {
    const py::object exception = std::move(pending_interrupt());
    pending_interrupt() = py::object();
    return PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  }
  const auto* const comm = dynamic_cast<const base::CommError*>(&error);
  const py::object type = py::module_::import("lockstep.errors").attr(class_name(error));
  const py::object exception =
      type(error.what(), py::arg("cause") = std::string(base::name(error.cause())), py::arg("hint") = error.hint(),
           py::arg("op") = comm ? comm->op() : "", py::arg("rank") = comm ? comm->rank() : -1,
           py::arg("peer") = comm ? comm->peer() : -1);
  PyErr_SetObject(type.ptr(), exception.ptr());
}

/// Replaces names of C++, such as "lockstep::optim" and "DdpOptions.ignore", by those of the package.
std::string in_python(const std::string& text) {
  std::string result = std::regex_replace(text, std::regex("\\bDdpOptions\\.(\\w+)"), "DistributedDataParallel($1=)");
  result = std::regex_replace(result, std::regex("\\bInitOptions\\.(\\w+)"), "init($1=)");
  result = std::regex_replace(result, std::regex("\\b[A-Z]\\w*Options\\.(\\w+)"), "$1=");
  return std::regex_replace(result, std::regex("\\b(lockstep|ddp|nn|optim|torch|[A-Z][a-z]\\w*)::(?=[A-Za-z_])"),
                            "$1.");
}

}  // namespace

void bind_errors(py::module_& module) {
  base::rename_in_errors(in_python);
  // For torch's extension as well: its functions call the backend of torch.distributed.
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const base::Error& error) {
      try {
        raise(error);
      } catch (py::error_already_set& while_raising) {
        while_raising.restore();
      }
    }
  });
  comm::channel::set_interrupt_check(is_interrupted);
  module.def(
      "report_failure",
      [](const std::string& cause, const std::string& text, const std::string& hint, bool led_to_cause) {
        return comm::report_failure(base::cause_from_name(cause), text, hint, led_to_cause);
      },
      py::arg("cause"), py::arg("text"), py::arg("hint"), py::arg("led_to_cause") = false, WithoutGil(),
      "Publishes an error that ends this process as the job's first cause. Returns the exit code.");
  module.def(
      "exception_text", [](const std::string& lines) { return job::find_python_exception(lines).text(); },
      "Returns the message, on one line, of what traceback.format_exception() returns.");
  module.def("version", [] { return LOCKSTEP_VERSION; });
}

}  // namespace lockstep::python
