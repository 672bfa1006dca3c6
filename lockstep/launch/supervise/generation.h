// One start of a job, from its hosts to its end.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/supervise/supervisor.h"

namespace lockstep::launcher {

/// What all starts of a job have in common.
struct JobSpec {
  RunOptions options;     ///< with all hosts
  LaunchContext context;  ///< but for what each start has of its own: addresses, key and generation
  StagedFiles cargo;
  std::uint64_t max_files = 0;            ///< soft limit of descriptors for agents
  int signals = -1;                       ///< of make_signal_fd(), as supervise() takes it
  std::vector<pid_t> inherited_children;  ///< likewise
};

struct WorldSize {
  int ranks = 0;
  std::size_t hosts = 0;

  friend bool operator==(const WorldSize&, const WorldSize&) = default;
};

/// Starts the job on those of its hosts whose numbers are in `hosts`, of which it needs `least`, and stays until it has
/// ended. For the first start, generation 0, throws Error before anything was started, for what is not allowed; of a
/// later one that is the verdict. `world` is that of the start before, and becomes that of this one, which says in a
/// line how they differ. What it writes about itself goes into folders gen.N of its own.
JobOutcome run_generation(const JobSpec& job, int generation, const std::vector<std::size_t>& hosts, std::size_t least,
                          WorldSize& world);

}  // namespace lockstep::launcher
