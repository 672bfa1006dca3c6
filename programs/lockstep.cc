// The program `lockstep`. It links only base, job and launch, so that it starts in milliseconds.
#include <cstdio>
#include <exception>

#include "lockstep/base/error.h"
#include "lockstep/job/fatal.h"
#include "lockstep/launch/agent/agent.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/doctor/doctor.h"
#include "lockstep/launch/output/status.h"
#include "lockstep/launch/predict/predict.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/python_program.h"
#include "lockstep/launch/slurm/step_task.h"
#include "lockstep/launch/slurm/submit.h"
#include "lockstep/launch/supervise/run.h"

namespace launcher = lockstep::launcher;

int main(int argc, char** argv) {
  launcher::process::open_standard_descriptors();
  try {
    launcher::cli::CommandLine command = launcher::cli::parse_command_line({argv + 1, argv + argc});
    switch (command.subcommand) {
      case launcher::cli::Subcommand::kRun: return launcher::supervise::run(std::move(command.run));
      case launcher::cli::Subcommand::kSubmit: return launcher::slurm::submit(std::move(command.arguments));
      case launcher::cli::Subcommand::kDoctor: return launcher::doctor::doctor(std::move(command.doctor));
      case launcher::cli::Subcommand::kPlan: return launcher::predict::plan(command.plan);
      case launcher::cli::Subcommand::kStatus: launcher::output::print_status(command.json); break;
      case launcher::cli::Subcommand::kBench: launcher::process::exec_companion("lockstep-bench", command.arguments);
      case launcher::cli::Subcommand::kBuild: launcher::process::exec_extension_build(std::move(command.python));
      case launcher::cli::Subcommand::kAgent:
        return command.agent.waits_in_step.empty() ? launcher::agent::agent_main(command.agent)
                                                   : launcher::slurm::wait_for_agent(command.agent.waits_in_step);
      case launcher::cli::Subcommand::kCmakeDir:
        std::puts(launcher::process::cmake_package_folder(launcher::process::executable_path()).c_str());
        break;
      case launcher::cli::Subcommand::kPrint: std::fputs(command.text.c_str(), stdout);
    }
    return 0;
  } catch (const lockstep::base::Error& error) {
    std::fprintf(stderr, "%s\n", lockstep::job::format_fatal(lockstep::job::to_fatal(error)).c_str());
    return lockstep::base::exit_code_before_start(error.cause());
  } catch (const std::exception& error) {
    const lockstep::base::Error internal(lockstep::base::Cause::kInternal, error.what());
    std::fprintf(stderr, "%s\n", lockstep::job::format_fatal(lockstep::job::to_fatal(internal)).c_str());
    return lockstep::base::exit_code(internal.cause());
  }
}
