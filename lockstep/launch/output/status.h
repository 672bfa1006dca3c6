// `lockstep status`: the ranks that run on this machine.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::launcher {

/// The ranks of this user on this host, whoever started them, by job and rank. Asks nobody: it reads the pages that
/// they show.
std::vector<base::RankSnapshot> find_local_ranks();

/// A table for people; `json`: one object a line, with bytes.
std::string status_text(const std::vector<base::RankSnapshot>& ranks, bool json);

}  // namespace lockstep::launcher
