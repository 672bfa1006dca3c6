// Log lines on stderr. Each line is one write(2), so lines of several processes do not mix. A line is dropped if stderr
// accepts no data for half a second.
#pragma once

#include <string_view>

namespace lockstep::base {

/// Writes "lockstep: TEXT" unless LOCKSTEP_LOG is "quiet". Throws UsageError if it is neither that nor "info".
/// Thread-safe.
void log_info(std::string_view text);
/// Writes "lockstep: warning: TEXT", also if LOCKSTEP_LOG is "quiet". Thread-safe.
void log_warning(std::string_view text);

/// Sets whether a progress bar occupies the terminal row of the cursor. While it is active, a log line erases the
/// bar first if stderr is a terminal. Thread-safe.
void set_progress_bar_active(bool active);

}  // namespace lockstep::base
