// Runs one generation of a job, from the start of its agents to the end of its ranks.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/hosts/start_agents.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/supervise/supervisor.h"

namespace lockstep::launcher::supervise {

/// The settings that all generations of a job share.
struct JobSpec {
  cli::RunOptions options;      ///< its hosts are all hosts of the job
  plan::LaunchContext context;  ///< without what each generation sets: addresses, key and generation
  hosts::StagedFiles staged_files;
  std::uint64_t max_files = 0;            ///< soft limit of file descriptors for agents
  int signals = -1;                       ///< a descriptor of make_signal_fd(), as for supervise()
  std::vector<pid_t> inherited_children;  ///< as for supervise()
};

/// The number of ranks of a generation, and of the hosts that they are on.
struct WorldSize {
  int ranks = 0;
  std::size_t hosts = 0;

  friend bool operator==(const WorldSize&, const WorldSize&) = default;
};

/// Starts the job on the hosts with the numbers `hosts`, of which it needs at least `min_hosts`, and blocks until it
/// has ended. In generation 0, throws Error if the job cannot be started; in later generations such an error becomes
/// the verdict.
///
/// `world` is the size of the previous generation. The call sets it to the size of this one and prints a line if they
/// differ. Later generations write their files into directories gen.N.
JobOutcome run_generation(const JobSpec& job, int generation, const std::vector<std::size_t>& hosts,
                          std::size_t min_hosts, WorldSize& world);

}  // namespace lockstep::launcher::supervise
