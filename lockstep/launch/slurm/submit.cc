#include "lockstep/launch/slurm/submit.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/submit_options.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/tools.h"
#include "lockstep/launch/slurm/batch_script.h"
#include "lockstep/launch/slurm/follow_job.h"

namespace lockstep::launcher {
namespace {

using namespace std::chrono_literals;

constexpr auto kSbatchTimeout = 60s;

void print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

std::string find_sbatch() {
  try {
    return find_program("sbatch", base::Env::this_process().path.value_or(""));
  } catch (const base::UsageError&) {
    throw base::UsageError(
        "lockstep submit: sbatch was not found in PATH, so SLURM is not installed here; allowed is --dry-run, which "
        "only shows the script");
  }
}

/// What can be seen here of a program that the nodes will start. One without a slash is looked for there.
void check_program(const std::string& program) {
  if (program.find('/') == std::string::npos) return;
  try {
    find_program(program, "");
  } catch (const base::UsageError& error) {
    throw base::UsageError(error.what(), "where only the nodes have it: env " + program);
  }
}

void create_directory(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw base::SystemError("--output: cannot make the folder " + base::quoted(folder, 256), error.value());
}

/// On one line.
std::string join_lines(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  std::string line;
  for (const char c : text) line += c == '\n' ? "; " : std::string(1, c);
  return line;
}

SlurmJob submit_script(const std::string& sbatch, const std::string& script, const std::vector<std::string>& options) {
  std::vector<std::string> words = {"sbatch", "--parsable"};
  words.insert(words.end(), options.begin(), options.end());
  const ToolResult answer = run_tool({.path = sbatch,
                                      .words = words,
                                      .environment = current_environment(),
                                      .directory = {},
                                      .limit = kSbatchTimeout,
                                      .input = script});
  if (answer.code == ToolResult::kTimedOut)
    throw base::Error(base::Cause::kCoordinatorLost,
                      "lockstep submit: sbatch has not ended within 60 s; the job may be in the queue nevertheless",
                      "squeue --me");
  if (answer.code != 0)
    throw base::UsageError("lockstep submit: sbatch ended with code " + std::to_string(answer.code) + ": " +
                           (answer.err.empty() ? "it gave no reason" : join_lines(answer.err)));
  std::fputs(answer.err.c_str(), stderr);
  const auto parts = base::split(join_lines(answer.out), ';');
  if (!base::parse_int(parts[0]))
    throw base::UsageError("lockstep submit: sbatch printed " + base::quoted(answer.out, 160) +
                           "; allowed is the number of a job");
  return {parts[0], parts.size() > 1 ? parts[1] : ""};
}

void save_script(const std::string& path, const std::string& script) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(script.data(), static_cast<std::streamsize>(script.size())).flush())
    std::fprintf(stderr, "lockstep: cannot write %s\n", path.c_str());
}

}  // namespace

int submit(std::vector<std::string> words) {
  const SubmitCommand submission = parse_submit_options(std::move(words));
  const SubmitOptions& options = submission.options;
  if (!submission.help.empty()) {
    print(submission.help);
    return 0;
  }
  const BatchContext context{std::filesystem::current_path().string(),
                             options.remote_path.empty() ? executable_path() : options.remote_path};
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
  return options.follow ? follow(job, log + ".out") : 0;
}

}  // namespace lockstep::launcher
