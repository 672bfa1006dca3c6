#include "lockstep/base/error.h"

#include <cstring>

namespace lockstep::base {

SystemError::SystemError(const std::string& message, int error_number, Cause cause)
    : Error(cause, message + ": " + std::strerror(error_number)), error_number_(error_number) {}

}  // namespace lockstep::base
