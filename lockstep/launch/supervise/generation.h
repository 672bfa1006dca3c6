// One generation of a job: from starting its agents to the end of its ranks.
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

/// What all generations of a job have in common.
struct JobSpec {
  RunOptions options;     ///< with all hosts of the job
  LaunchContext context;  ///< without what each generation sets: addresses, key and generation
  StagedFiles staged_files;
  std::uint64_t max_files = 0;            ///< soft limit of file descriptors for agents
  int signals = -1;                       ///< of make_signal_fd(), as for supervise()
  std::vector<pid_t> inherited_children;  ///< as for supervise()
};

struct WorldSize {
  int ranks = 0;
  std::size_t hosts = 0;

  friend bool operator==(const WorldSize&, const WorldSize&) = default;
};

/// Starts the job on the hosts with the numbers `hosts`, of which it needs `min_hosts`, and blocks until it has ended.
/// In generation 0, throws Error before any rank has started if the request is invalid; in later generations such an
/// error becomes the verdict. `world`: the size in the previous generation; set to the size in this one, and a
/// difference is reported in one line. Later generations write their files into directories gen.N.
JobOutcome run_generation(const JobSpec& job, int generation, const std::vector<std::size_t>& hosts,
                          std::size_t min_hosts, WorldSize& world);

}  // namespace lockstep::launcher
