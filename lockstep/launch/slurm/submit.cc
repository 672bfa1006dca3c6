#include "lockstep/launch/slurm/submit.h"

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/submit_options.h"
#include "lockstep/launch/process/environment.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/tools.h"
#include "lockstep/launch/slurm/batch_script.h"
#include "lockstep/launch/slurm/follow_job.h"

namespace lockstep::launcher::slurm {
namespace {

using namespace std::chrono_literals;

constexpr auto kSbatchTimeout = 60s;

void print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

std::string find_sbatch() {
  try {
    return process::find_program("sbatch", base::Env::this_process().path.value_or(""));
  } catch (const base::UsageError&) {
    throw base::UsageError("lockstep submit: sbatch not found in PATH: SLURM is not installed here",
                           "--dry-run prints the script only");
  }
}

/// Checks that a program given by a path can be executed. Does not check a name without a slash, which the nodes look
/// up in PATH.
void check_program(const std::string& program) {
  if (program == ":") throw base::UsageError("lockstep submit: the program is \":\"; expected one job and its program");
  if (program.find('/') == std::string::npos) return;
  try {
    process::find_program(program, "");
  } catch (const base::UsageError& error) {
    throw base::UsageError(error.what(), "if only the nodes have it: env " + program);
  }
}

/// Joins the lines of `text` with "; ".
std::string join_lines(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::string line;
  for (const char c : text) line += c == '\n' ? "; " : std::string(1, c);
  return line;
}

/// Checks that bash can read the commands of --before: a batch job with an error of syntax ends without a line.
void check_commands(const std::vector<std::string>& commands) {
  for (const std::string& command : commands) {
    const process::ToolResult read =
        process::run_tool({.path = process::find_tool("bash"), .argv = {"bash", "-O", "extglob", "-n", "-c", command}});
    if (!read.path.empty() && read.code != 0)
      throw base::UsageError("--before is " + base::quoted(command, 160) + "; bash says " +
                             base::quoted(join_lines(read.err), 160));
  }
}

void create_directory(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw base::SystemError("--output: cannot create directory " + base::quoted(folder, 256), error.value());
}

SlurmJob submit_script(const std::string& sbatch, const std::string& script, const std::vector<std::string>& options) {
  std::vector<std::string> argv = {"sbatch", "--parsable"};
  argv.insert(argv.end(), options.begin(), options.end());
  const process::ToolResult result =
      process::run_tool({.path = sbatch, .argv = argv, .limit = kSbatchTimeout, .input = script});
  if (result.code == process::ToolResult::kTimedOut)
    throw base::Error(base::Cause::kCoordinatorLost,
                      "lockstep submit: sbatch did not finish within 60 s; the job may have been submitted",
                      "check with squeue --me");
  if (result.code != 0)
    throw base::UsageError("lockstep submit: sbatch exited with code " + std::to_string(result.code) + ": " +
                           (result.err.empty() ? "no error message" : join_lines(result.err)));
  std::fputs(result.err.c_str(), stderr);
  const auto parts = base::split(join_lines(result.out), ';');
  if (!base::parse_int(parts[0]))
    throw base::UsageError("lockstep submit: sbatch printed " + base::quoted(result.out, 160) +
                           "; expected a job number");
  return {parts[0], parts.size() > 1 ? parts[1] : ""};
}

void save_script(const std::string& path, const std::string& script) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(script.data(), static_cast<std::streamsize>(script.size())).flush())
    std::fprintf(stderr, "lockstep: cannot write %s\n", path.c_str());
}

}  // namespace

int submit(std::vector<std::string> arguments) {
  const cli::SubmitCommand submission = cli::parse_submit_options(std::move(arguments));
  const cli::SubmitOptions& options = submission.options;
  if (!submission.help.empty()) {
    print(submission.help);
    return 0;
  }
  const BatchContext context{.directory = process::current_directory(),
                             .lockstep = options.remote_path.empty() ? process::executable_path() : options.remote_path,
                             .has_output_directory = !options.dry_run || std::filesystem::is_directory(options.output)};
  check_commands(options.before);
  const std::string script = batch_script(options, context);
  if (options.dry_run) {
    print(script);
    return 0;
  }
  const std::string sbatch = find_sbatch();
  check_program(options.command.front());
  print(script + "\n");
  create_directory(options.output);
  const SlurmJob job = submit_script(sbatch, script, sbatch_arguments(options, context));
  const std::string log = options.output + "/" + job.id;
  save_script(log + ".sh", script);
  print("submitted batch job " + job.id + "; its output: " + log + (options.array.empty() ? "" : "_INDEX") + ".out\n");
  return options.follow ? follow_job(job, log + ".out") : 0;
}

}  // namespace lockstep::launcher::slurm
