#include "lockstep/base/error.h"

#include <cstdio>
#include <cstring>

namespace lockstep::base {
namespace {

std::string (*renaming)(const std::string& text) = nullptr;

std::string renamed(const std::string& text) { return renaming ? renaming(text) : text; }

}  // namespace

Error::Error(Cause cause, const std::string& message, const std::string& hint)
    : std::runtime_error(renamed(message)), cause_(cause), hint_(renamed(hint)) {}

void rename_in_errors(std::string (*rename)(const std::string& text)) { renaming = rename; }

void check_option(bool good, const std::string& owner, const std::string& option, double value,
                  const std::string& expected) {
  if (good) return;
  char number[32];
  std::snprintf(number, sizeof number, "%.12g", value);
  throw UsageError(owner + ": " + option + " is " + number + "; expected " + expected);
}

SystemError::SystemError(const std::string& message, int error_number, Cause cause, const std::string& hint)
    : Error(cause, message + ": " + std::strerror(error_number), hint), error_number_(error_number) {}

}  // namespace lockstep::base
