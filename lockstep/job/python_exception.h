// What Python prints of the exception that ends a program.
#pragma once

#include <string>
#include <string_view>

namespace lockstep::job {

/// The line before the calls of an exception.
inline constexpr std::string_view kTraceback = "Traceback (most recent call last):";

/// Between the first exception of a chain and the last.
inline constexpr std::string_view kThen = "; then ";

/// The messages of an exception, each on one line of at most 400 bytes.
struct PythonException {
  /// "ValueError: bad value": that during whose handling the others were raised, or their cause. Not an ImportError,
  /// after which programs often go on.
  std::string first;
  std::string last;  ///< the exception that ended the program; often `first`. Empty: there is none

  /// Returns "FIRST; then LAST", or the only one.
  std::string text() const { return first == last ? last : first + std::string(kThen) + last; }
};

/// Finds the exception in the last lines that a program wrote to stderr, or in what traceback.format_exception()
/// returns. `prefix` is at the start of each line. A message of several lines is shortened to its first; the cause that
/// NCCL prints as its last error, and the exception of another process, such as a worker of a DataLoader, whose
/// traceback is a part of the message, follow in parentheses. An error of argparse, which has no traceback, counts too.
/// Pure.
PythonException find_python_exception(std::string_view lines, std::string_view prefix = {});

/// Returns the part of PythonException::text() that is `first`.
std::string_view first_of(std::string_view text);

}  // namespace lockstep::job
