#include "lockstep/launch/slurm/submit.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/process/environment.h"
#include "lockstep/launch/process/process.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/tools.h"

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

/// The job id that sbatch printed.
struct SlurmJob {
  std::string id;
  std::string cluster;  ///< empty: the cluster of this machine
};

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

constexpr auto kLogInterval = 500ms;         // between reads of the log
constexpr auto kFirstPollInterval = 1000ms;  // between queries, each of which loads SLURM's controller
constexpr auto kMaxPollInterval = 15000ms;
constexpr auto kReplyTimeout = 30s;
constexpr auto kGiveUpAfter = 5min;
// The states in which a job stays.
constexpr std::array<std::string_view, 10> kFinalStates = {"COMPLETED", "FAILED",    "CANCELLED",     "TIMEOUT",
                                                           "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
                                                           "DEADLINE",  "REVOKED"};

/// Returns the value in "... NAME=VALUE ...".
std::string field_value(std::string_view line, std::string_view name) {
  const std::string key = " " + std::string(name) + "=";
  const std::size_t begin = line.find(key);
  if (begin == std::string_view::npos) return "";
  const std::string_view value = line.substr(begin + key.size());
  return std::string(value.substr(0, value.find_first_of(" \n")));
}

/// Returns 7 for "7:0" and 137 for "0:9", which is an exit code and a signal.
int parse_exit_code(const std::string& text) {
  const auto numbers = base::split(text, ':');
  const auto code = base::parse_int(numbers[0]);
  const auto signal = numbers.size() > 1 ? base::parse_int(numbers[1]) : std::nullopt;
  return static_cast<int>(signal.value_or(0) > 0 ? 128 + *signal : code.value_or(0));
}

/// Asks SLURM for the state of the job. Returns nullopt if SLURM does not reply.
std::optional<SlurmJobState> query_job(const SlurmJob& job) {
  const auto call = [&](std::vector<std::string> argv) {
    if (!job.cluster.empty()) argv.insert(argv.begin() + 1, "--clusters=" + job.cluster);
    return process::run_tool({.path = process::find_tool(argv[0]), .argv = argv, .limit = kReplyTimeout});
  };
  const process::ToolResult scontrol = call({"scontrol", "--oneliner", "show", "job", job.id});
  if (scontrol.succeeded()) return parse_scontrol(scontrol.out);
  if (scontrol.err.find("Invalid job id") == std::string::npos) return std::nullopt;
  // scontrol has no record of a job some minutes after its end, but sacct may have one.
  const process::ToolResult accounting =
      call({"sacct", "--parsable2", "--noheader", "--allocations", "--format=State,ExitCode", "--jobs=" + job.id});
  if (accounting.code == process::ToolResult::kTimedOut) return std::nullopt;
  return accounting.succeeded() ? parse_sacct(accounting.out) : SlurmJobState{};
}

/// Prints a file as it grows. Opens it for each read, so that changes made on another machine are visible.
class LogTail {
 public:
  explicit LogTail(std::string path) : path_(std::move(path)) {}

  /// Returns false if stdout is closed.
  bool print_new() {
    const base::Fd file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    char block[65536];
    for (ssize_t size = 0; file && (size = ::pread(file.get(), block, sizeof block, printed_)) > 0; printed_ += size)
      if (std::fwrite(block, 1, static_cast<std::size_t>(size), stdout) != static_cast<std::size_t>(size)) return false;
    return std::fflush(stdout) == 0;
  }

 private:
  std::string path_;
  off_t printed_ = 0;
};

/// Queries the state of a job at growing intervals and prints changes.
class SlurmJobPoller {
 public:
  explicit SlurmJobPoller(SlurmJob job) : job_(std::move(job)) {}

  bool is_due() const { return next_.expired(); }
  SlurmJobState poll() {
    const auto now = query_job(job_);
    next_ = base::Deadline::in(pause_);
    pause_ = std::min<std::chrono::milliseconds>(pause_ * 3 / 2, kMaxPollInterval);
    if (!now && give_up_.expired())
      throw base::Error(base::Cause::kCoordinatorLost,
                        "job " + job_.id + ": no reply from SLURM for 5 minutes; the job may still be running");
    if (!now) return {};
    give_up_ = base::Deadline::in(kGiveUpAfter);
    if (now->state.empty())
      throw base::Error(base::Cause::kCoordinatorLost,
                        "job " + job_.id + " has ended, and SLURM has no record of its exit code");
    report_change(*now);
    return *now;
  }

 private:
  void report_change(const SlurmJobState& now) {
    const bool waits = now.state == "PENDING" && !now.reason.empty() && now.reason != "None";
    const std::string text = now.state + (waits ? " (" + now.reason + ")" : "");
    if (text != reported_) std::fprintf(stderr, "lockstep: job %s is %s\n", job_.id.c_str(), text.c_str());
    reported_ = text;
  }

  SlurmJob job_;
  std::string reported_;
  std::chrono::milliseconds pause_ = kFirstPollInterval;
  base::Deadline next_ = base::Deadline::in(0s);
  base::Deadline give_up_ = base::Deadline::in(kGiveUpAfter);
};

/// Copies new content of the file `log`, which need not exist yet, to stdout, and prints changes of the job's state on
/// stderr. Blocks until the job has ended, and returns its exit code. Ctrl-C and SIGTERM end the call but not the job;
/// it then returns 128 + the signal. Queries SLURM every second at first, later every 15 s. Blocks all signals of the
/// calling thread, which must be the only one. Throws Error if SLURM has not replied for five minutes or has no record
/// of how the job ended.
int follow_job(const SlurmJob& job, const std::string& log) {
  const base::Fd signals = process::make_signal_fd({SIGINT, SIGTERM});
  LogTail tail(log);
  SlurmJobPoller poller(job);
  for (;;) {
    const SlurmJobState state = poller.is_due() ? poller.poll() : SlurmJobState{};
    if (!tail.print_new()) return 128 + SIGPIPE;
    if (has_ended(state)) return exit_code_for(state);
    pollfd wait{signals.get(), POLLIN, 0};
    ::poll(&wait, 1, base::Deadline::in(kLogInterval).poll_ms());
    if (const auto signal = process::read_signal(signals.get())) {
      std::fprintf(stderr, "lockstep: job %s keeps running; squeue -j %s shows it, scancel %s cancels it\n",
                   job.id.c_str(), job.id.c_str(), job.id.c_str());
      return 128 + *signal;
    }
  }
}

constexpr std::size_t kMaxCommentColumn = 44;  // longer directives do not move the comments of the others

struct Directive {
  std::vector<std::string> words;
  std::string comment;
};

/// Returns "1 d 2 h 3 min 4 s" for 93784.
std::string duration_text(std::int64_t seconds) {
  std::string text;
  const auto add = [&](std::int64_t unit, const char* name) {
    if (seconds >= unit) text += (text.empty() ? "" : " ") + std::to_string(seconds / unit) + name;
    seconds %= unit;
  };
  add(86400, " d");
  add(3600, " h");
  add(60, " min");
  add(1, " s");
  return text.empty() ? "no limit" : text;
}

/// Escapes the output directory for SLURM's filename patterns.
std::string slurm_pattern(const std::string& directory) {
  std::string pattern;
  for (const char c : directory) pattern += c == '%' ? "%%" : std::string(1, c);
  return pattern;
}

std::vector<Directive> directives(const cli::SubmitOptions& submit, const BatchContext& context) {
  std::vector<Directive> all;
  const auto add = [&](const char* name, const std::string& value, const std::string& comment = "") {
    if (!value.empty()) all.push_back({{std::string(name) + value}, comment});
  };
  const auto number = [](int value) { return value > 0 ? std::to_string(value) : std::string(); };
  add("--job-name=", submit.name);
  add("--nodes=", submit.nodes);
  add("--gpus-per-node=", submit.gpus_per_node);
  add("--ntasks=", number(submit.ranks), "total number of ranks");
  add("--ntasks-per-node=", number(submit.ranks_per_node), "ranks per node");
  add("--cpus-per-task=", number(submit.cpus_per_rank), "cores per rank");
  add("--mem=", submit.mem, "memory per node");
  add("--time=", submit.time, duration_text(cli::parse_time_limit(submit.time).value_or(0)));
  add("--partition=", submit.partition);
  add("--account=", submit.account);
  add("--array=", submit.array, submit.grid.empty() ? "" : "one task for each line of the grid below");
  add("--chdir=", context.directory);
  const std::string job = submit.array.empty() ? "%j" : "%A_%a";
  // SLURM opens this file before the script runs, and creates no directory for it.
  add("--output=", context.has_output_directory ? slurm_pattern(submit.output) + "/" + job + ".out" : job + ".out",
      "the output of each rank is also in " + (context.has_output_directory ? job : submit.output + "/" + job) + "/");
  all.push_back({{submit.requeue ? "--requeue" : "--no-requeue"}, submit.requeue ? "if the exit code is 75" : ""});
  if (submit.requeue) add("--open-mode=", "append", "a requeued job appends to the file");
  if (submit.signal_before > 0)
    add("--signal=", "B:USR1@" + std::to_string(submit.signal_before),
        "to this shell, " + duration_text(submit.signal_before) + " before the limit");
  add("--mail-user=", submit.mail);
  if (!submit.mail.empty()) add("--mail-type=", "END,FAIL,REQUEUE");
  for (const auto& words : submit.sbatch_options) all.push_back({words, ""});
  return all;
}

std::string header(const std::vector<Directive>& all) {
  std::vector<std::string> lines;
  std::size_t column = 0;
  for (const Directive& directive : all) {
    const std::string line = "#SBATCH " + base::joined(directive.words, " ", sbatch_quote);
    if (!directive.comment.empty() && line.size() + 2 <= kMaxCommentColumn) column = std::max(column, line.size() + 2);
    lines.push_back(line);
  }
  std::string text;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i].comment.empty()) lines[i].resize(std::max(column, lines[i].size() + 2), ' ');
    text += lines[i] + (all[i].comment.empty() ? "" : "# " + all[i].comment) + "\n";
  }
  return text;
}

std::string run_line(const cli::SubmitOptions& submit, const BatchContext& context) {
  std::string text = shell_quote(context.lockstep) + " run --output=\"$logs\"";
  for (const std::string& word : submit.run_options) text += " " + shell_quote(word);
  return text + " -- \\\n  " + base::joined(submit.command, " ", shell_quote) +
         (submit.grid.empty() ? "" : " \"${grid[@]}\"");
}

/// The commands of --before. `set -u` comes after them, because scripts of environments use unset variables.
std::string preparation(const cli::SubmitOptions& submit) {
  std::string text;
  for (const std::string& command : submit.before)
    text += "{ " + command + "\n} || exit\n";  // the line may end with a comment
  return text.empty() ? text : "\n# --before: the job ends if one of them fails.\n" + text;
}

/// The arguments that the tasks of an array add, and a line in the log that says which ones this task has.
std::string grid(const cli::SubmitOptions& submit) {
  if (submit.grid.empty()) return "";
  std::string text = "\ncase $SLURM_ARRAY_TASK_ID in\n";
  for (std::size_t i = 0; i < submit.grid.size(); ++i)
    text += "  " + std::to_string(i) + ") grid=(" + base::joined(submit.grid[i], " ", shell_quote) + ") ;;\n";
  return text + "esac\necho \"$job: ${grid[*]}\"\n";
}

std::string job_variables(const cli::SubmitOptions& submit) {
  const std::string job = submit.array.empty() ? "$SLURM_JOB_ID" : "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID";
  return "job=" + job + "\nlogs=" + shell_quote(submit.output + "/") + "$job" +
         (submit.requeue ? "${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}" : "") + "\n";
}

const char* const kSignalForwarding =
    "# SLURM sends USR1 to this shell only: forward it, so that the ranks save and exit.\n"
    "trap 'kill -USR1 \"$ranks\"' USR1\n";

// bash 5.2 lost the exit code in 31 of 500 runs when a signal arrived within 25 ms of the end.
const char* const kWaiting =
    "\n"
    "# Not only wait: bash can lose the exit code if a signal interrupts wait.\n"
    "while [ \"$(jobs -r)\" ]; do\n"
    "  sleep 0.5\n"
    "done\n"
    "trap '' USR1 TERM\n"
    "wait \"$ranks\"\n"
    "code=$?\n";

const char* const kRequeueing =
    "\n"
    "# 75: all ranks have exited together and want to be restarted.\n"
    "if [ $code -eq 75 ] && [ $ended = no ]; then\n"
    "  echo \"$job: requeued, because its ranks exited with code 75\" >&2\n"
    "  scontrol requeue \"$job\"\n"
    "fi\n";

}  // namespace

std::string batch_script(const cli::SubmitOptions& submit, const BatchContext& context) {
  if (context.directory.find_first_of("\r\n") != std::string::npos)
    throw base::UsageError("lockstep submit: the current directory is " + base::quoted(context.directory, 256) +
                           "; expected a path without line breaks, which #SBATCH lines cannot contain");
  std::string text = "#!/bin/bash\n# Written by lockstep submit.\n" + header(directives(submit, context)) +
                     preparation(submit) + "\nset -u\n" + job_variables(submit) + grid(submit) + "\n";
  if (!submit.requeue && submit.signal_before == 0) return text + "exec " + run_line(submit, context) + "\n";
  text += (submit.requeue ? "ended=no\n" : "") + run_line(submit, context) + " &\nranks=$!\n\n";
  if (submit.signal_before > 0) text += kSignalForwarding;
  text += "# At the time limit and on scancel, SLURM sends TERM to the ranks as well: do not forward it.\n";
  text += std::string("trap '") + (submit.requeue ? "ended=yes" : ":") + "' TERM\n" + kWaiting;
  if (submit.requeue) text += kRequeueing;
  return text + "exit $code\n";
}

std::vector<std::string> sbatch_arguments(const cli::SubmitOptions& submit, const BatchContext& context) {
  std::vector<std::string> all;
  for (const Directive& directive : directives(submit, context))
    all.insert(all.end(), directive.words.begin(), directive.words.end());
  return all;
}

std::string shell_quote(std::string_view word) {
  if (!word.empty() && base::is_alnum_or(word, "_@%+=:,./-")) return std::string(word);
  const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
  // Escape control characters: sbatch rejects scripts with carriage returns, and a reader could take a second line for
  // another command.
  const bool escapes = std::ranges::any_of(word, is_control);
  std::string text = escapes ? "$'" : "'";
  for (const char c : word) {
    char code[8] = {c, '\0'};
    if (escapes && c == '\n')
      std::snprintf(code, sizeof code, "\\n");
    else if (escapes && c == '\r')
      std::snprintf(code, sizeof code, "\\r");
    else if (escapes && c == '\t')
      std::snprintf(code, sizeof code, "\\t");
    else if (escapes && is_control(static_cast<unsigned char>(c)))
      std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned>(c));
    else if (escapes && (c == '\'' || c == '\\'))
      std::snprintf(code, sizeof code, "\\%c", c);
    else if (c == '\'')
      std::snprintf(code, sizeof code, "'\\''");
    text += code;
  }
  return text + "'";
}

std::string sbatch_quote(std::string_view word) {
  const auto is_plain = [](unsigned char c) { return c > 0x20 && c != '"' && c != '\'' && c != '\\' && c != '#'; };
  if (!word.empty() && std::ranges::all_of(word, is_plain)) return std::string(word);
  std::string text = "\"";
  for (const char c : word) text += (c == '"' || c == '\\' ? "\\" : "") + std::string(1, c);
  return text + "\"";
}

SlurmJobState parse_scontrol(std::string_view line) {
  return {field_value(line, "JobState"), field_value(line, "Reason"), parse_exit_code(field_value(line, "ExitCode"))};
}

SlurmJobState parse_sacct(std::string_view text) {
  const auto fields = base::split(text.substr(0, text.find('\n')), '|');
  // "CANCELLED by 1000"
  return {fields[0].substr(0, fields[0].find(' ')), "", fields.size() > 1 ? parse_exit_code(fields[1]) : 0};
}

bool has_ended(const SlurmJobState& state) {
  return std::ranges::find(kFinalStates, state.state) != kFinalStates.end();
}

int exit_code_for(const SlurmJobState& state) { return state.code == 0 && state.state != "COMPLETED" ? 1 : state.code; }

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
