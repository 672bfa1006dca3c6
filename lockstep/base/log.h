// Log lines on stderr. Each line is one write(2), so lines of several processes do not mix. A line is dropped if stderr
// accepts no data for half a second.
#pragma once

#include <string_view>

namespace lockstep::base {

enum class LogLevel { kQuiet, kInfo, kDebug };

/// Returns the level set by LOCKSTEP_LOG; defaults to kInfo. Throws UsageError for an unknown level.
LogLevel log_level();

/// Writes "lockstep: TEXT" if the level is kInfo or higher. Throws UsageError if LOCKSTEP_LOG is invalid. Thread-safe.
void log_info(std::string_view text);
/// Like log_info(), but only if the level is kDebug.
void log_debug(std::string_view text);
/// Writes "lockstep: warning: TEXT" at every level. Thread-safe.
void log_warning(std::string_view text);

/// Sets whether a progress bar occupies the terminal row of the cursor. While it is active, a log line erases the
/// bar first if stderr is a terminal. Thread-safe.
void set_progress_bar_active(bool active);

}  // namespace lockstep::base
