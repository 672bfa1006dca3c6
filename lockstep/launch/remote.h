// How an agent is started on another host: what ssh is told, and what it means when that does not work. Pure.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/launch/host_list.h"

namespace lockstep::launcher {

/// The words that start the agent on `host`: ssh without questions, which ends when the connection is silent for 6 s, and `exec PATH agent --guarded` there. `own_path` is
/// where this program is. Throws UsageError when a shell there would not take the path as one plain word.
std::vector<std::string> ssh_words(const Host& host, const std::string& own_path, std::chrono::seconds connect_timeout);

/// What an agent on another host that never spoke died of: in words, with a hint of what to do. `code` is ssh's, `text` what ssh and the shell there wrote.
base::UsageError start_error(const Host& host, const std::string& agent_path, int code, const std::string& text);

}  // namespace lockstep::launcher
