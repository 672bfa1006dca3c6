// The command `lockstep status`: lists the ranks that run on this host.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::launcher::output {

/// Returns the ranks of this user on this host, whichever launcher started them, sorted by job and rank. Only reads
/// their pages in shared memory.
std::vector<base::telemetry::RankSnapshot> find_local_ranks();

/// Returns one table per job. With `json`, returns one JSON object per line, with sizes in bytes.
std::string status_text(const std::vector<base::telemetry::RankSnapshot>& ranks, bool json);

}  // namespace lockstep::launcher::output
