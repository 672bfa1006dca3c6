// The program `lockstep`. It links only base, job and launch, so that it starts in milliseconds.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/job/fatal.h"
#include "lockstep/launch/agent/agent.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/doctor/doctor.h"
#include "lockstep/launch/output/status.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/slurm/step_task.h"
#include "lockstep/launch/slurm/submit.h"
#include "lockstep/launch/supervise/run.h"

namespace launcher = lockstep::launcher;

int main(int argc, char** argv) {
  launcher::open_standard_descriptors();
  try {
    launcher::CommandLine command = launcher::parse_command_line({argv + 1, argv + argc});
    switch (command.subcommand) {
      case launcher::Subcommand::kRun: return launcher::run(std::move(command.run));
      case launcher::Subcommand::kSubmit: return launcher::submit(std::move(command.arguments));
      case launcher::Subcommand::kDoctor: return launcher::doctor(std::move(command.doctor));
      case launcher::Subcommand::kStatus:
        std::fputs(launcher::status_text(launcher::find_local_ranks(), command.json).c_str(), stdout);
        break;
      case launcher::Subcommand::kBench: launcher::exec_companion("lockstep-bench", command.arguments);
      case launcher::Subcommand::kAgent:
        return command.agent.waits_in_step.empty() ? launcher::agent_main(command.agent)
                                                   : launcher::wait_for_agent(command.agent.waits_in_step);
      case launcher::Subcommand::kPrint: std::fputs(command.text.c_str(), stdout);
    }
    return 0;
  } catch (const lockstep::base::Error& error) {
    std::fprintf(stderr, "%s\n", lockstep::job::format_fatal(lockstep::job::to_fatal(error)).c_str());
    return lockstep::base::exit_code(error.cause());
  } catch (const std::exception& error) {
    const lockstep::base::Error internal(lockstep::base::Cause::kInternal, error.what());
    std::fprintf(stderr, "%s\n", lockstep::job::format_fatal(lockstep::job::to_fatal(internal)).c_str());
    return lockstep::base::exit_code(internal.cause());
  }
}
