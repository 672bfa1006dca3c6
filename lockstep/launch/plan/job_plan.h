// From what a person asked for to what every rank gets: a pure function.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/net/socket.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/job/job_key.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/plan/host_info.h"

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
  std::string directory;               ///< entered first; empty: the agent's own
  bool extends_own_environment =
      false;  ///< the environment comes on top of the agent's own, as a login on another host gives it
  Environment environment;
  std::vector<RankPlan> ranks;
  std::chrono::milliseconds fail_grace{2000};
  std::string run_dir;  ///< where stacks go; made when there is one
  job::JobKey key{};    ///< for the ranks' pages
};

/// What the plan depends on besides the options.
struct LaunchContext {
  Environment environment;            ///< of the launcher
  std::string program;                ///< where the program was found
  std::string directory;              ///< that the ranks start in, absolute; empty: the launcher's
  std::string here;                   ///< the launcher's
  std::vector<std::string> exported;  ///< names of variables that go everywhere
  base::Address store;
  std::string job;
  base::Address master;  ///< what torch.distributed's programs meet at
  std::string run_dir;   ///< runs/NAME
  int generation = 0;    ///< how often the job was started before
  job::JobKey key{};
  int columns = 0;  ///< of the launcher's terminal; 0: stdout is none
};

/// A host of the job.
struct Node {
  HostInfo info;
  std::string name;                ///< as a person has named it
  int ranks = 0;                   ///< that it gets; neighbours in rank order, after those of the nodes before it
  bool here = true;                ///< its agent was started by the launcher itself
  bool step = false;               ///< SLURM has given it to us, with GPUs of its own choice
  std::string wanted_interface{};  ///< its own, from the host list
  std::string interface{};         ///< whose address its ranks use; empty: they are all on one host
  std::size_t number = 0;          ///< among all hosts of the job, from 0
};

/// Of the launcher's variables those that the ranks of a host get.
Environment inherited_environment(const Node& node, const LaunchContext& context);

/// A plan for the agent of each node. The ranks here inherit the launcher's environment, those elsewhere what a login
/// there gives and of the launcher's what travels(); both without what another launcher (torchrun, SLURM, PMI) says
/// about a rank. They get LOCKSTEP_*, torchrun's names, and OMP_NUM_THREADS unless it is set. Each node has a rank at
/// least.
std::vector<JobPlan> plan_jobs(const RunOptions& options, const LaunchContext& context, const std::vector<Node>& nodes);

/// `environment` with the values that are in `exports`, NAME=VALUE. Throws UsageError for a NAME alone that is not set.
Environment apply_exports(Environment environment, const std::vector<std::string>& exports);

/// Whether a variable of the launcher's goes to other hosts without -x.
bool is_forwarded(std::string_view name);

/// The variables that `own` and `added` make together: those added replace, and what another launcher says about a rank
/// is taken out of `own`.
Environment merged(const Environment& own, const Environment& added);

/// `environment` without the variables that `others` has: each rank has its own value of them.
Environment remove_variables(Environment environment, const Environment& others);

/// How many ranks a host gets when nobody says: its GPUs that --gpus or CUDA_VISIBLE_DEVICES leaves, else its cores; at
/// least 1.
int default_ranks(const RunOptions& options, const LaunchContext& context, const Node& node);

/// Ranks of each host: -n `ranks` fills them in order, 0 takes all slots; hosts that are left without one get 0. Throws
/// UsageError with both numbers when there are more ranks than slots.
std::vector<int> fill_slots(const std::vector<int>& slots, int ranks);

/// When ranks count as hanging: as the options say, else LOCKSTEP_TIMEOUT.
job::HealthLimits health_limits(const RunOptions& options, const Environment& environment);

/// The "[rank] " in front of each line of output, "[host:rank] " when `host` is not empty.
std::string rank_prefix(int rank, std::string_view host = {});

}  // namespace lockstep::launcher
