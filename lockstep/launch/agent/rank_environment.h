// The command line and the environment of one rank, on this host.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/plan/job_plan.h"
#include "lockstep/launch/process/environment.h"

namespace lockstep::launcher::agent {

/// Returns the arguments of the job, and those of the rank.
std::vector<std::string> rank_argv(const plan::JobPlan& job, const plan::RankPlan& plan);

/// Returns the variables of the job, and those of the rank; `page` is the descriptor of its page, and `error_file` the
/// file for its error.
process::Environment rank_environment(const plan::JobPlan& job, const plan::RankPlan& plan, int page,
                                      const std::string& error_file);

/// Replaces the program, or the Python script, of the job by the copies that the launcher has sent, if it has.
void use_staged_files(plan::JobPlan& job, const cli::AgentOptions& staged);

/// Adds the folder of the Python hook to PYTHONPATH, so that a program with torch.distributed is watched. No effect if
/// the interpreter has the hook: the package is installed there; if the hook is neither `staged_hook` nor
/// installed with this program; or if LOCKSTEP_WATCH is "off". Any program may start an interpreter, so what the
/// program is does not matter.
/// Returns a warning if the folder cannot be in PYTHONPATH, which separates folders by ':'; otherwise "".
std::string add_python_hook(plan::JobPlan& job, const std::string& staged_hook);

}  // namespace lockstep::launcher::agent
