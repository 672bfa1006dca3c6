// From what a person asked for to what every rank gets: a pure function.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/job/job_key.h"
#include "lockstep/job/pulse.h"
#include "lockstep/launch/options.h"
#include "lockstep/launch/placement.h"

namespace lockstep::launcher {

/// Variables as execve(2) takes them: "NAME=value".
using Environment = std::vector<std::string>;

/// What one rank has that the others do not.
struct RankPlan {
  int rank = 0;
  Environment environment;             ///< on top of JobPlan::environment
  std::vector<std::string> arguments;  ///< after JobPlan::arguments
  std::vector<int> cpus;               ///< empty: not bound
};

/// All that an agent has to know.
struct JobPlan {
  std::string program;                 ///< path of an executable file
  std::vector<std::string> arguments;  ///< argv, from argv[0]
  Environment environment;
  std::vector<RankPlan> ranks;
  std::chrono::milliseconds fail_grace{2000};
  std::string run_dir;                 ///< where stacks go; made when there is one
  job::JobKey key{};                   ///< for the ranks' pages
};

/// What the plan depends on besides the options.
struct Surroundings {
  Environment environment;       ///< of the launcher
  std::vector<Cpu> cpus;
  std::string program;           ///< where the program was found
  std::string store;             ///< host:port
  std::string job;
  std::uint16_t master_port = 0;
  std::string run_dir;           ///< runs/NAME
  job::JobKey key{};
  int columns = 0;               ///< of the launcher's terminal; 0: stdout is none
};

/// The ranks inherit the launcher's environment, without what another launcher (torchrun, SLURM, PMI) says about a rank,
/// and get LOCKSTEP_*, torchrun's names, and OMP_NUM_THREADS unless it is set. options.ranks is at least 1.
JobPlan plan_job(const RunOptions& options, const Surroundings& surroundings);

/// What -n is when it is not given: the GPUs that CUDA_VISIBLE_DEVICES leaves of `gpus`, else the cores; at least 1.
int default_ranks(const Environment& environment, int gpus, int cores);

/// When ranks count as hanging: as the options say, else LOCKSTEP_TIMEOUT.
job::PulseLimits pulse_limits(const RunOptions& options, const Environment& environment);

/// The "[rank] " in front of each line of output.
std::string prefix_of(int rank);

}  // namespace lockstep::launcher
