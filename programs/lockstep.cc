// The program `lockstep`. It links base, job and launch alone, so that it starts in milliseconds.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/launch/agent/agent.h"
#include "lockstep/launch/slurm/step_task.h"
#include "lockstep/launch/doctor/doctor.h"
#include "lockstep/launch/supervise/run.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/output/status.h"
#include "lockstep/launch/slurm/submit.h"

namespace launcher = lockstep::launcher;

int main(int argc, char** argv) {
  launcher::open_standard_descriptors();
  try {
    launcher::Command command = launcher::parse_command_line({argv + 1, argv + argc});
    switch (command.verb) {
      case launcher::Verb::kRun: return launcher::run(std::move(command.run));
      case launcher::Verb::kSubmit: return launcher::submit(std::move(command.words));
      case launcher::Verb::kDoctor: return launcher::doctor(std::move(command.doctor));
      case launcher::Verb::kStatus:
        std::fputs(launcher::status_text(launcher::find_ranks(), command.json).c_str(), stdout);
        break;
      case launcher::Verb::kBench: launcher::become_companion("lockstep-bench", command.words);
      case launcher::Verb::kAgent:
        return command.agent.attends.empty() ? launcher::agent_main(command.agent)
                                             : launcher::attend(command.agent.attends);
      case launcher::Verb::kPrint: std::fputs(command.text.c_str(), stdout);
    }
    return 0;
  } catch (const lockstep::base::Error& error) {
    std::fprintf(stderr, "%s\n", lockstep::job::to_line(launcher::fatal_of(error)).c_str());
    return lockstep::base::exit_code(error.cause());
  } catch (const std::exception& error) {
    const lockstep::base::Error internal(lockstep::base::Cause::kInternal, error.what());
    std::fprintf(stderr, "%s\n", lockstep::job::to_line(launcher::fatal_of(internal)).c_str());
    return lockstep::base::exit_code(internal.cause());
  }
}
