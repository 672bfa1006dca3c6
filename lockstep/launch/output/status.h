// The command `lockstep status`: lists the ranks of the jobs that `lockstep run` has started on this host, on all their
// hosts, and all ranks that run on this host.
#pragma once

#include <string>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/launch/protocol/status_messages.h"

namespace lockstep::launcher::output {

/// Prints the jobs of this user on stdout, and what has not replied on stderr. With `json`, prints one JSON object per
/// rank and line. Blocks for at most base::kStatusTimeout, and for 0.5 s more if there are ranks of other launchers,
/// whose CPU time it measures.
void print_status(bool json);

/// Combines the reports about the ranks of each job. A report of a launcher takes precedence over that of an agent, and
/// either over `pages`, the pages of ranks on `host`, where the report says anything of a rank. Sorted by job and rank.
/// Ranks that are only in `pages` have no resource use. Pure.
std::vector<protocol::JobStatus> combine_reports(std::vector<protocol::JobStatus> reports,
                                                 const std::vector<base::telemetry::RankSnapshot>& pages,
                                                 const std::string& host);

/// Returns one table per job. `host` is the name of this host. With `json`, returns one JSON object per line, with
/// sizes in bytes. Pure.
std::string status_text(const std::vector<protocol::JobStatus>& jobs, const std::string& host, bool json);

}  // namespace lockstep::launcher::output
