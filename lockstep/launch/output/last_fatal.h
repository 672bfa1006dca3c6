// The FATAL line of this user's last failed job on this host, for `lockstep doctor --report`: a file of mode 0600,
// $XDG_CACHE_HOME/lockstep/last-fatal or ~/.cache/lockstep/last-fatal.
#pragma once

#include <optional>
#include <string>

#include "lockstep/base/env.h"

namespace lockstep::launcher::output {

/// Replaces the line. Does nothing if that is impossible, as without a home directory. Follows no symbolic link.
/// Blocks as long as the file system does.
void save_last_fatal(const std::string& line, const base::Env& env) noexcept;

/// Returns the line, at most 64 KiB of it; nullopt if there is none.
std::optional<std::string> last_fatal(const base::Env& env);

}  // namespace lockstep::launcher::output
