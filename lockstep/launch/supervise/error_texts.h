// The remedies for known errors, and what else the text of an error says.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::launcher::supervise {

/// An error of torch, CUDA, NCCL, Gloo, Horovod, Apex or Python.
struct KnownError {
  std::string text;        ///< a part of its message
  std::string remedy;      ///< the hint
  bool is_victim = false;  ///< it says only that another process has ended
};

/// The table of docs/reference/error-texts.md, in its order. The first row whose text occurs is used.
const std::vector<KnownError>& known_errors();

/// Parses rows of a user's table, one per line: the text, a tab, and the remedy. Empty lines, and lines that start with
/// '#', are skipped. Throws UsageError with the number of a line without a tab or with an empty part.
std::vector<KnownError> parse_known_errors(std::string_view file, std::string_view name);

/// Returns the rows of the file LOCKSTEP_ERROR_HINTS; none if the variable is not set. Throws UsageError, also if the
/// file cannot be read or has more than 1 MiB.
std::vector<KnownError> read_own_errors();

/// Returns the same; none on an error, after the job has started.
std::vector<KnownError> own_errors_or_none();

/// Returns the row of `table` that applies to the lines, or null. Pure.
const KnownError* find_known_error(std::string_view lines, const std::vector<KnownError>& table);

/// Returns whether an exception, or the last lines of a rank without one, say only that another process has ended or
/// closed a connection. Pure.
bool is_victim(std::string_view text);

/// Returns the port in such an exception of Gloo, "Connection closed by peer [127.0.0.1]:7087"; 0 if it has none. Pure.
int lost_port(std::string_view text);

}  // namespace lockstep::launcher::supervise
