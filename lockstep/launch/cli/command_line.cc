#include "lockstep/launch/cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/injection.h"
#include "lockstep/launch/cli/help_layout.h"
#include "lockstep/launch/cli/horovodrun.h"
#include "lockstep/launch/cli/host_options.h"
#include "lockstep/launch/cli/option_parsing.h"
#include "lockstep/launch/cli/suggestion.h"

namespace lockstep::launcher::cli {
namespace {

constexpr int kMaxRanks = 4096;
constexpr int kMaxHosts = 65536;
constexpr int kMaxRestarts = 1000000;
constexpr double kMaxRestartPause = 60;  // seconds

const std::vector<std::string> kCommandNames = {"run", "submit", "doctor", "status", "bench"};
const std::string kCommands = base::alternatives(kCommandNames);

const char* const kUsage =
    "usage: lockstep COMMAND [options]\n"
    "\n"
    "Commands:\n"
    "  run        start N ranks of a program on one or several hosts; end all of them when one fails\n"
    "  submit     write a SLURM batch script that runs a program with lockstep run, and submit it\n"
    "  doctor     check each host for problems before anything is started\n"
    "  status     print the ranks of the jobs on this host: progress, CPU, memory and current operation\n"
    "  bench      measure this machine: Lockstep compared with Gloo, MPI and PyTorch\n"
    "\n"
    "Example: lockstep run -n 4 ./train --epochs 3\n"
    "\n"
    "lockstep help COMMAND, or lockstep COMMAND --help, prints the options of a command.\n"
    "lockstep --version prints the version.\n"
    "lockstep --cmake-dir prints the folder of the installed CMake package, for CMAKE_PREFIX_PATH.\n";

const char* const kStatusUsage =
    "usage: lockstep status [--json]\n"
    "\n"
    "Prints the ranks of your jobs: those that lockstep run has started from this host, on all their\n"
    "hosts, and those on this host, whichever launcher started them. A rank may run any program.\n"
    "\n"
    "For each rank: the process and its state; its CPU time in percent of one core, over the last 0.5 to\n"
    "2 s; and its resident memory (rss). For a rank in which lockstep::init() has returned, also: the\n"
    "number of gradient reductions that it has started; the memory of its arena, which the other ranks of\n"
    "the host read, in use, at its peak and resident; its current operation with the time spent in it,\n"
    "the last operation that finished, and the ranks that have not arrived. For other ranks, the state is\n"
    "\"no init() yet\": they run another program, or are still starting.\n"
    "\n"
    "Options:\n"
    "  -h, --help                    show this text\n"
    "  --json                        print one JSON object per rank and line, with sizes in bytes\n"
    "  Example: lockstep status --json\n";

const char* const kRunUsage = "lockstep run [options] [--] program [arguments...]";

constexpr const char* kProgramGroup = "What to run";
constexpr const char* kDeviceGroup = "GPUs and cores";
constexpr const char* kOutputGroup = "Output";
constexpr const char* kFailureGroup = "Failures";
constexpr const char* kTestGroup = "Testing";

/// The options as text. CLI11 only splits the command line. The functions below check the values, so that all messages
/// have the same form.
struct RawRunOptions {
  RawHostOptions hosts;
  std::string gpus, ranks, transport, hang_timeout, work_timeout, idle_timeout, host_timeout, stall_timeout,
      join_timeout, bind, output, name, inject, stdin_ranks, grace, fail_grace, max_restarts, restart_pause, min_hosts;
};

void declare_program_options(CLI::App& app, RawRunOptions& raw, RunOptions& run) {
  begin_option_group(app, kProgramGroup);
  app.set_help_flag("-h,--help", "show this text");
  declare_option(app, "-n,--ranks", raw.ranks, "N",
                 "number of ranks, 1 to 4096, also -np (default: all slots of the hosts; a host without slots gets one "
                 "rank per visible GPU, else one per physical core)");
  app.add_option("-x,--export", run.exports,
                 "set this variable for the ranks on all hosts, to VALUE or to its value here; may be repeated")
      ->type_name("NAME[=VALUE]")
      ->expected(1)
      ->take_all();
  app.add_flag("--pass-local-rank{local_rank}", run.local_rank_argument,
               "append --local_rank=K, or --NAME=K, to the arguments of the rank with local rank K")
      ->type_name("[=NAME]");
  declare_option(app, "--transport", raw.transport, "NAME",
                 "how ranks exchange data: auto (default), self, shm, hierarchy, tcp, mpi or nccl");
}

void declare_run_host_options(CLI::App& app, RawRunOptions& raw, RunOptions& run) {
  declare_host_options(app, raw.hosts);
  app.add_flag("--ship", run.ship,
               "copy lockstep, and the folder of a Python script or else a program given as a path, to hosts that lack "
               "them: to ~/.cache/lockstep, compared by content");
  app.add_option("--slurm-step", run.slurm_step)->group("");  // set by launch() only
}

void declare_device_options(CLI::App& app, RawRunOptions& raw, RunOptions& run) {
  begin_option_group(app, kDeviceGroup);
  declare_option(app, "--gpus", raw.gpus, "LIST",
                 "GPUs that ranks may use, in the form of CUDA_VISIBLE_DEVICES; local rank K uses the K-th");
  app.add_flag("--isolate-gpus", run.isolate_gpus, "each rank sees its own GPU only, as number 0");
  app.add_flag("--share-gpus", run.share_gpus,
               "allow more ranks than GPUs, which then share them; over NCCL from 2.30 on");
  declare_option(app, "--bind", raw.bind, "MODE",
                 "cores of its own for each rank: auto (default): unless a Python program would get only one; cores: "
                 "always; none: never");
}

void declare_output_options(CLI::App& app, RawRunOptions& raw, RunOptions& run) {
  begin_option_group(app, kOutputGroup);
  declare_option(app, "--stdin", raw.stdin_ranks, "RANKS",
                 "the ranks that read the standard input of lockstep: none (default), 0 or all; the others read "
                 "/dev/null");
  declare_option(app, "--output", raw.output, "DIR",
                 "also write the output of each rank to DIR/rank.N.out and DIR/rank.N.err");
  app.add_flag("--quiet-ranks", run.quiet_ranks, "print the output of rank 0 only");
  declare_option(app, "--name", raw.name, "NAME",
                 "name of the run (default: the program's name and the time); a Trainer's files and the stacks of "
                 "hanging ranks go to runs/NAME");
  app.add_flag("--trace", run.trace,
               "let a Trainer write trace.json, for Perfetto and chrome://tracing: the latest steps of all ranks, with "
               "each gradient bucket");
}

void declare_failure_options(CLI::App& app, RawRunOptions& raw) {
  begin_option_group(app, kFailureGroup);
  declare_option(app, "--grace", raw.grace, "SECONDS", "from SIGTERM to SIGKILL when you stop the job (default 10)");
  declare_option(
      app, "--fail-grace", raw.fail_grace, "SECONDS",
      "from SIGTERM to SIGKILL after a rank has failed, and for processes that outlive their rank (default 2)");
  declare_option(app, "--max-restarts", raw.max_restarts, "N",
                 "restart all ranks, at most N times, after failures that may be transient, such as a killed rank or a "
                 "lost host (default 0)");
  declare_option(app, "--restart-pause", raw.restart_pause, "SECONDS",
                 "pause before a restart (default 1); it doubles with each restart, up to 60, and is reset by a newer "
                 "checkpoint");
  declare_option(app, "--min-hosts", raw.min_hosts, "M",
                 "restart with fewer ranks if at least M hosts are left; failed hosts are not used for a while "
                 "(default: all hosts)");
  declare_option(app, "--join-timeout", raw.join_timeout, "SECONDS",
                 "time limit for all ranks to join the job (default 60)");
  declare_option(app, "--hang-timeout", raw.hang_timeout, "SECONDS",
                 "end the job if no rank makes progress for this long (default 300; 0: no limit, for a debugger)");
  declare_option(app, "--work-timeout", raw.work_timeout, "SECONDS",
                 "end the job if a rank works for this long without reporting progress while others wait for it "
                 "(default 1800; 0: no limit)");
  declare_option(app, "--idle-timeout", raw.idle_timeout, "SECONDS",
                 "end the job if no process of any rank uses CPU time for this long; for programs that use neither "
                 "Lockstep nor torch.distributed (default 0: no limit)");
  declare_option(app, "--stall-timeout", raw.stall_timeout, "SECONDS",
                 "end the job if a rank sends no heartbeat for this long (default 30; 0: no limit)");
  declare_option(app, "--host-timeout", raw.host_timeout, "SECONDS",
                 "end the job if one host receives no packet from another for this long (1 to 3600, default 5); a "
                 "shorter cut of the network only delays the job");
}

void declare_test_options(CLI::App& app, RawRunOptions& raw) {
  begin_option_group(app, kTestGroup);
  declare_option(app, "--inject", raw.inject, "KIND@rank=R,step=S",
                 "inject a fault into rank R's S-th gradient reduction; KIND is kill, stop, segv, loop, throw, desync, "
                 "corrupt (a NaN in a gradient), flip (one bit of a mean) or slow");
}

void declare_run_options(CLI::App& app, RawRunOptions& raw, RunOptions& run) {
  declare_program_options(app, raw, run);
  declare_run_host_options(app, raw, run);
  declare_device_options(app, raw, run);
  declare_output_options(app, raw, run);
  declare_failure_options(app, raw);
  declare_test_options(app, raw);
  app.footer(
      "Each line of a rank's output begins with [rank]. The exit code is that of the first rank that failed, or 128 + "
      "N "
      "if signal N ended it; 64 means that nothing was started. Ctrl-C stops all ranks, and a second Ctrl-C kills "
      "them.");
  set_help_layout(app, {.usage = kRunUsage,
                        .examples = {
                            {kProgramGroup, "lockstep run -n 4 ./train --epochs 3"},
                            {kHostGroup, "lockstep run -H alpha:4,beta:4 --ship ./train"},
                            {kDeviceGroup, "lockstep run -n 2 --gpus 4,5 python train.py"},
                            {kOutputGroup, "lockstep run -n 4 --name baseline --output logs --quiet-ranks ./train"},
                            {kFailureGroup, "lockstep run -H alpha:4,beta:4 --max-restarts 5 --min-hosts 1 ./train"},
                            {kTestGroup, "lockstep run -n 4 --inject kill@rank=2,step=100 ./train"},
                        }});
}

/// Checks that `list` holds numbers or UUIDs of devices, separated by commas.
const std::string& checked_gpus(const std::string& list) {
  const auto allowed = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '/'; };
  for (const std::string& one : base::split(list, ','))
    if (one.empty() || one.size() > 64 || one[0] == '-' || !std::all_of(one.begin(), one.end(), allowed))
      throw base::UsageError("--gpus is " + base::quoted(list, 80) +
                             "; expected numbers or UUIDs of GPUs, separated by commas");
  return list;
}

void check_argument_name(const std::string& name) {
  for (const char c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-')
      throw base::UsageError("--pass-local-rank is " + base::quoted(name, 80) +
                             "; expected letters, digits, '_' and '-'");
}

/// Checks that `name` is one path component, because it becomes a directory below runs/.
std::string checked_name(const std::string& name) {
  const auto allowed = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.';
  };
  if (name.empty() || name.size() > 128 || name[0] == '.' || name[0] == '-' ||
      !std::all_of(name.begin(), name.end(), allowed))
    throw base::UsageError(
        "--name is " + base::quoted(name, 80) +
        "; expected 1 to 128 letters, digits, '_', '-' and '.', beginning with a letter, a digit or '_'");
  return name;
}

void check_restarts(const CLI::App& app, const RawRunOptions& raw, RunOptions& run) {
  if (is_given(app, "--max-restarts"))
    run.max_restarts = static_cast<int>(base::parse_int_in_range("--max-restarts", raw.max_restarts, 0, kMaxRestarts));
  for (const char* name : {"--restart-pause", "--min-hosts"})
    if (is_given(app, name) && !is_given(app, "--max-restarts"))
      throw base::UsageError(std::string("lockstep run: ") + name + " requires --max-restarts");
  if (is_given(app, "--min-hosts"))
    run.min_hosts = static_cast<int>(base::parse_int_in_range("--min-hosts", raw.min_hosts, 1, kMaxHosts));
  if (!is_given(app, "--restart-pause")) return;
  if (base::parse_double(raw.restart_pause).value_or(-1) > kMaxRestartPause)
    throw base::UsageError("--restart-pause is " + base::quoted(raw.restart_pause, 80) + "; expected seconds, 0 to 60");
  run.restart_pause = milliseconds("--restart-pause", raw.restart_pause);
}

void check_run_options(const CLI::App& app, const RawRunOptions& raw, RunOptions& run) {
  const auto given = [&](const char* name) { return is_given(app, name); };
  if (given("-n")) run.ranks = static_cast<int>(base::parse_int_in_range("-n", raw.ranks, 1, kMaxRanks));
  check_host_options(app, "run", raw.hosts, run);
  for (const std::string& variable : run.exports)
    if (variable.empty() || variable[0] == '=')
      throw base::UsageError("-x is " + base::quoted(variable, 80) + "; expected NAME or NAME=VALUE");
  if (given("--gpus")) run.gpus = checked_gpus(raw.gpus);
  if (given("--transport"))
    run.transport =
        check_one_of("--transport", raw.transport, {"auto", "self", "shm", "hierarchy", "tcp", "mpi", "nccl"});
  if (given("--bind")) {
    const std::string bind = check_one_of("--bind", raw.bind, {"auto", "cores", "none"});
    run.bind = bind == "cores" ? Bind::kCores : bind == "none" ? Bind::kNone : Bind::kAuto;
  }
  if (given("--grace")) run.grace = milliseconds("--grace", raw.grace);
  if (given("--fail-grace")) run.fail_grace = milliseconds("--fail-grace", raw.fail_grace);
  const auto keep = [&](const char* name, const std::string& text, std::string& kept) {
    if (!given(name)) return;
    seconds(name, text, 1e-3);
    kept = text;
  };
  keep("--join-timeout", raw.join_timeout, run.join_timeout);
  if (given("--hang-timeout")) run.hang_timeout = milliseconds("--hang-timeout", raw.hang_timeout);
  if (given("--work-timeout")) run.work_timeout = milliseconds("--work-timeout", raw.work_timeout);
  if (given("--idle-timeout")) run.idle_timeout = milliseconds("--idle-timeout", raw.idle_timeout);
  if (given("--stall-timeout")) run.stall_timeout = milliseconds("--stall-timeout", raw.stall_timeout);
  if (given("--host-timeout"))
    run.host_timeout = std::chrono::seconds(base::parse_int_in_range("--host-timeout", raw.host_timeout, 1, 3600));
  check_restarts(app, raw, run);
  if (given("--inject")) {
    job::parse_injection("--inject", raw.inject);
    run.inject = raw.inject;
  }
  if (given("--name")) run.name = checked_name(raw.name);
  if (given("--stdin")) {
    const std::string ranks = check_one_of("--stdin", raw.stdin_ranks, {"none", "0", "all"});
    run.stdin_ranks = ranks == "all" ? StdinRanks::kAll : ranks == "0" ? StdinRanks::kRankZero : StdinRanks::kNone;
  }
  if (given("--output")) run.output_dir = check_not_empty("--output", raw.output, "the path of a directory");
  check_argument_name(run.local_rank_argument);
}

CommandLine parse_run(std::vector<std::string> words) {
  CommandLine command;
  RawRunOptions raw;
  CLI::App app("Starts N ranks of a program on one or several hosts, and ends all of them when one fails.");
  declare_run_options(app, raw, command.run);

  auto program = parse_options(app, "run", std::move(words));
  if (!program) {
    command.text = app.help();
    return command;
  }
  check_run_options(app, raw, command.run);

  command.run.command = std::move(*program);
  if (command.run.command.empty() || command.run.command.front().empty())
    throw base::UsageError(std::string("lockstep run: no program given; expected ") + kRunUsage);
  command.subcommand = Subcommand::kRun;
  return command;
}

CommandLine parse_status(const std::vector<std::string>& words) {
  if (words.empty()) return {Subcommand::kStatus, {}, "", {}};
  if (words.size() == 1 && words[0] == "--json") return {Subcommand::kStatus, {}, "", {}, true};
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h"))
    return {Subcommand::kPrint, {}, kStatusUsage, {}};
  throw base::UsageError("lockstep status: unknown argument " + base::quoted(words.back(), 80) +
                         "; expected --json or --help");
}

/// Parses the options of `lockstep agent`, which only the launcher executes.
CommandLine parse_agent(const std::vector<std::string>& words) {
  CommandLine command{.subcommand = Subcommand::kAgent};
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--guarded")
      command.agent.guarded = true;
    else if (words[i] == "--slurm-step" && i + 1 < words.size())
      command.agent.slurm_step = words[++i];
    else if (words[i] == "--staged-program" && i + 1 < words.size())
      command.agent.staged_program = words[++i];
    else if (words[i] == "--staged-script" && i + 1 < words.size())
      command.agent.staged_script = words[++i];
    else if (words[i] == "--staged-hook" && i + 1 < words.size())
      command.agent.staged_hook = words[++i];
    else if (words[i] == "--wait-in-step" && i + 1 < words.size())
      command.agent.waits_in_step = words[++i];
    else
      throw base::UsageError("lockstep agent: unknown option " + base::quoted(words[i], 80) +
                             "; lockstep run starts the agents itself");
  }
  return command;
}

/// Treats `lockstep help run` as `lockstep run --help`.
CommandLine parse_help(const std::vector<std::string>& topics) {
  if (topics.empty()) return {Subcommand::kPrint, {}, kUsage, {}};
  if (topics.size() > 1)
    throw base::UsageError("lockstep help: unexpected argument " + base::quoted(topics[1], 80) +
                           "; expected one command");
  for (const std::string& command : kCommandNames)
    if (topics[0] == command) return parse_command_line({command, "--help"});
  throw base::UsageError("lockstep help: unknown command " + base::quoted(topics[0], 80) + "; expected " + kCommands +
                         suggestion(topics[0], kCommandNames));
}

}  // namespace

CommandLine parse_command_line(std::vector<std::string> arguments) {
  if (arguments.empty()) throw base::UsageError("lockstep: no command given; expected " + kCommands + ", or --help");
  const std::string subcommand = arguments.front();
  arguments.erase(arguments.begin());
  if (subcommand == "run") return parse_run(std::move(arguments));
  if (subcommand == "horovodrun") {
    const bool help = arguments.empty() || arguments[0] == "--help" || arguments[0] == "-h";
    return help ? CommandLine{Subcommand::kPrint, {}, kHorovodrunUsage, {}}
                : parse_run(translate_horovodrun(arguments));
  }
  if (subcommand == "doctor") {
    CommandLine command;
    command.doctor = parse_doctor_options(std::move(arguments), command.text);
    if (command.text.empty()) command.subcommand = Subcommand::kDoctor;
    return command;
  }
  if (subcommand == "status") return parse_status(arguments);
  if (subcommand == "submit") return {Subcommand::kSubmit, {}, "", std::move(arguments)};
  if (subcommand == "bench") return {Subcommand::kBench, {}, "", std::move(arguments)};
  if (subcommand == "agent") return parse_agent(arguments);
  if (subcommand == "help") return parse_help(arguments);
  if (subcommand == "--help" || subcommand == "-h") return {Subcommand::kPrint, {}, kUsage, {}};
  if (subcommand == "--version")
    return {Subcommand::kPrint, {}, std::string("lockstep ") + LOCKSTEP_VERSION + "\n", {}};
  if (subcommand == "--cmake-dir") return {Subcommand::kCmakeDir, {}, "", {}};
  throw base::UsageError("lockstep: unknown command " + base::quoted(subcommand, 80) + "; expected " + kCommands +
                         ", or --help" + suggestion(subcommand, kCommandNames));
}

}  // namespace lockstep::launcher::cli
