// Lines for the person who watches: to stderr, whole, one write each; dropped when stderr takes nothing for half a
// second.
#pragma once

#include <string_view>

namespace lockstep::base {

enum class LogLevel { kQuiet, kInfo, kDebug };

/// What LOCKSTEP_LOG says; kInfo when it says nothing. Throws UsageError for another word.
LogLevel log_level();

/// "lockstep: TEXT" when the level allows it. Any thread.
void log_info(std::string_view text);
void log_debug(std::string_view text);
/// "lockstep: warning: TEXT", at every level.
void log_warning(std::string_view text);

/// Whether a progress bar stands on the row of the terminal where the cursor is: then a line on stderr, if that is a
/// terminal, takes its place.
void set_progress_bar_active(bool active);

}  // namespace lockstep::base
