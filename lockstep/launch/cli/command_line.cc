#include "lockstep/launch/cli/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/injection.h"
#include "lockstep/launch/cli/host_options.h"
#include "lockstep/launch/cli/option_parsing.h"

namespace lockstep::launcher {
namespace {

constexpr int kMaxRanks = 4096;
constexpr int kMaxHosts = 65536;
constexpr int kMaxRestarts = 1000000;
constexpr double kMaxRestartPause = 60;  // seconds

const char* const kUsage =
    "usage: lockstep COMMAND\n"
    "\n"
    "Commands:\n"
    "  run        start N ranks of a program, here or on several hosts, and end all of them when one fails\n"
    "  submit     the same as a batch job of SLURM: write its script, show it, submit it\n"
    "  doctor     look at each host, before anything starts, for what would go wrong there\n"
    "  status     show the ranks that run here: how far they are, and what their arenas hold\n"
    "  bench      measure this machine: Lockstep beside Gloo, MPI and PyTorch\n"
    "\n"
    "lockstep COMMAND --help shows the options of a command; lockstep --version the version.\n";

const char* const kStatusUsage =
    "usage: lockstep status [--json]\n"
    "\n"
    "Shows your ranks on this machine, whoever started them: how many exchanges of gradients they have begun; of the "
    "arena, the\n"
    "memory that neighbours read, what is in use, the most that was, and what the process holds; and in which "
    "operation they\n"
    "are, for how long, what they finished last, and who has not come. Ranks appear when lockstep::init() returns.\n"
    "\n"
    "Options:\n"
    "  -h,--help                   show this text\n"
    "  --json                      one object a line, sizes in bytes\n";

/// The options as text; CLI11 finds them, and values are checked here, so that all messages have one form.
struct RawRunOptions {
  RawHostOptions hosts;
  std::string gpus, ranks, transport, hang_timeout, stall_timeout, join_timeout, bind, output, name, inject, grace,
      fail_grace, max_restarts, restart_pause, min_hosts;
};

class RunFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "usage: lockstep run [options] [--] program [arguments...]\n";
  }
};

void declare_run_options(CLI::App& app, RawRunOptions& raw, RunOptions& run) {
  app.set_help_flag("-h,--help", "show this text");
  app.formatter(std::make_shared<RunFormatter>());
  const auto option = [&](const char* name, std::string& value, const char* type, const char* text) {
    declare_option(app, name, value, type, text);
  };
  option("-n,--ranks", raw.ranks, "N",
         "number of ranks, 1 to 4096 (also -np); default: all slots of the hosts, of one without slots the visible "
         "GPUs, else the physical cores");
  declare_host_options(app, raw.hosts);
  app.add_flag("--ship", run.ship,
               "copy lockstep, and a program named by a path, to hosts that lack them: ~/.cache/lockstep there, by "
               "their content");
  app.add_option("-x,--export", run.exports,
                 "a variable for the ranks on all hosts, as it is here or with this value; may be repeated")
      ->type_name("NAME[=VALUE]")
      ->expected(1)
      ->take_all();
  option("--gpus", raw.gpus, "LIST",
         "GPUs that ranks may use, as CUDA_VISIBLE_DEVICES takes them; the rank with local rank K uses the K-th");
  app.add_flag("--isolate-gpus", run.isolate_gpus, "each rank sees its own GPU only, as number 0");
  app.add_flag("--share-gpus", run.share_gpus, "allow more ranks than GPUs: they take turns");
  app.add_option("--attended", run.slurm_step)->group("");  // launch() sets it
  option("--transport", raw.transport, "NAME",
         "how ranks exchange data: auto (default), self, shm, hierarchy, gloo, mpi or nccl");
  option("--bind", raw.bind, "HOW", "cores: every rank has its own cores (default); none: no rank is bound");
  app.add_flag("--pass-local-rank{local_rank}", run.local_rank_argument,
               "append --local_rank=K (with =NAME: --NAME=K) to the arguments of local rank K")
      ->type_name("[=NAME]");
  option("--output", raw.output, "DIR", "write what each rank prints to DIR/rank.N.out and DIR/rank.N.err as well");
  option("--name", raw.name, "NAME",
         "of this run: stacks of ranks that hang go to runs/NAME, and what a Trainer writes (default: the program's "
         "name and the time)");
  app.add_flag("--trace", run.trace,
               "a Trainer writes trace.json, for Perfetto and chrome://tracing: the newest steps of all ranks, with "
               "each bucket of gradients");
  app.add_flag("--quiet-ranks", run.quiet_ranks, "show the output of rank 0 only");
  option("--grace", raw.grace, "SECONDS", "from SIGTERM to SIGKILL when you stop the job (default 10)");
  option("--fail-grace", raw.fail_grace, "SECONDS", "the same when a rank has failed (default 2)");
  option("--max-restarts", raw.max_restarts, "N",
         "after a failure that another start may not have, as when a rank is killed or a host is lost, start all ranks "
         "again, N times at most (default 0)");
  option("--restart-pause", raw.restart_pause, "SECONDS",
         "before the first restart, and after each newer checkpoint; else it doubles, up to 60 (default 1)");
  option("--min-hosts", raw.min_hosts, "M",
         "with which a restart goes on, with fewer ranks, while others rest because they have failed (default: all)");
  option("--join-timeout", raw.join_timeout, "SECONDS", "that the ranks have to find each other (default 60)");
  option("--hang-timeout", raw.hang_timeout, "SECONDS",
         "in which some rank must get on, else the job ends (default 300; 0: never, for a debugger)");
  option("--stall-timeout", raw.stall_timeout, "SECONDS",
         "in which every rank must show a sign of life (default 30; 0: never)");
  option(
      "--inject", raw.inject, "FAULT",
      "KIND@rank=R,step=S: a fault on purpose in rank R's S-th exchange of gradients; KIND is kill, stop, segv, loop, "
      "throw, desync, corrupt (a NaN in a gradient), flip (a bit of a mean) or slow");
  app.footer(
      "The ranks' lines have [rank] in front; their standard input is /dev/null. The exit code is that of the first "
      "rank\n"
      "that failed, or 128 + the signal that ended it; 64 means that nothing was started. Ctrl-C stops all ranks, a "
      "second\n"
      "one kills them.");
}

/// Numbers or UUIDs of devices, with commas between.
const std::string& checked_gpus(const std::string& list) {
  const auto allowed = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '/'; };
  for (const std::string& one : base::split(list, ','))
    if (one.empty() || one.size() > 64 || one[0] == '-' || !std::all_of(one.begin(), one.end(), allowed))
      throw base::UsageError("--gpus is " + base::quoted(list, 80) +
                             "; allowed are numbers of GPUs, or their UUIDs, with commas between");
  return list;
}

void check_argument_name(const std::string& name) {
  for (const char c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-')
      throw base::UsageError("--pass-local-rank is " + base::quoted(name, 80) +
                             "; allowed are letters, digits, '_' and '-'");
}

/// A plain name, so that it is one folder below runs/.
std::string checked_name(const std::string& name) {
  const auto allowed = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.';
  };
  if (name.empty() || name.size() > 128 || name[0] == '.' || name[0] == '-' ||
      !std::all_of(name.begin(), name.end(), allowed))
    throw base::UsageError(
        "--name is " + base::quoted(name, 80) +
        "; allowed are 1 to 128 letters, digits, '_', '-' and '.', the first a letter, a digit or '_'");
  return name;
}

void check_restarts(const CLI::App& app, const RawRunOptions& raw, RunOptions& run) {
  if (is_given(app, "--max-restarts"))
    run.max_restarts = static_cast<int>(base::parse_int_in_range("--max-restarts", raw.max_restarts, 0, kMaxRestarts));
  for (const char* name : {"--restart-pause", "--min-hosts"})
    if (is_given(app, name) && !is_given(app, "--max-restarts"))
      throw base::UsageError(std::string("lockstep run: ") + name +
                             " is given without --max-restarts; allowed is it with that");
  if (is_given(app, "--min-hosts"))
    run.min_hosts = static_cast<int>(base::parse_int_in_range("--min-hosts", raw.min_hosts, 1, kMaxHosts));
  if (!is_given(app, "--restart-pause")) return;
  if (base::parse_double(raw.restart_pause).value_or(-1) > kMaxRestartPause)
    throw base::UsageError("--restart-pause is " + base::quoted(raw.restart_pause, 80) +
                           "; allowed are seconds, 0 to 60");
  run.restart_pause = milliseconds("--restart-pause", raw.restart_pause);
}

void check_run_options(const CLI::App& app, const RawRunOptions& raw, RunOptions& run) {
  const auto given = [&](const char* name) { return is_given(app, name); };
  if (given("-n")) run.ranks = static_cast<int>(base::parse_int_in_range("-n", raw.ranks, 1, kMaxRanks));
  check_host_options(app, "run", raw.hosts, run);
  for (const std::string& variable : run.exports)
    if (variable.empty() || variable[0] == '=')
      throw base::UsageError("-x is " + base::quoted(variable, 80) + "; allowed is NAME or NAME=VALUE");
  if (given("--gpus")) run.gpus = checked_gpus(raw.gpus);
  if (given("--transport"))
    run.transport =
        check_one_of("--transport", raw.transport, {"auto", "self", "shm", "hierarchy", "gloo", "mpi", "nccl"});
  if (given("--bind")) run.bind = check_one_of("--bind", raw.bind, {"cores", "none"}) == "cores";
  if (given("--grace")) run.grace = milliseconds("--grace", raw.grace);
  if (given("--fail-grace")) run.fail_grace = milliseconds("--fail-grace", raw.fail_grace);
  const auto keep = [&](const char* name, const std::string& text, std::string& kept) {
    if (!given(name)) return;
    seconds(name, text, 1e-3);
    kept = text;
  };
  keep("--join-timeout", raw.join_timeout, run.join_timeout);
  if (given("--hang-timeout")) run.hang_timeout = milliseconds("--hang-timeout", raw.hang_timeout);
  if (given("--stall-timeout")) run.stall_timeout = milliseconds("--stall-timeout", raw.stall_timeout);
  check_restarts(app, raw, run);
  if (given("--inject")) {
    job::parse_injection("--inject", raw.inject);
    run.inject = raw.inject;
  }
  if (given("--name")) run.name = checked_name(raw.name);
  if (given("--output")) run.output_dir = check_not_empty("--output", raw.output, "the name of a folder");
  check_argument_name(run.local_rank_argument);
}

CommandLine parse_run(std::vector<std::string> words) {
  CommandLine command;
  RawRunOptions raw;
  CLI::App app("Starts N ranks of a program, here or on several hosts, and ends all of them when one fails.");
  declare_run_options(app, raw, command.run);

  auto program = parse_options(app, "run", std::move(words));
  if (!program) {
    command.text = app.help();
    return command;
  }
  check_run_options(app, raw, command.run);

  command.run.command = std::move(*program);
  if (command.run.command.empty() || command.run.command.front().empty())
    throw base::UsageError(
        "lockstep run: no program is named; allowed is: lockstep run [options] [--] program [arguments...]");
  command.subcommand = Subcommand::kRun;
  return command;
}

CommandLine parse_status(const std::vector<std::string>& words) {
  if (words.empty()) return {Subcommand::kStatus, {}, "", {}};
  if (words.size() == 1 && words[0] == "--json") return {Subcommand::kStatus, {}, "", {}, true};
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h"))
    return {Subcommand::kPrint, {}, kStatusUsage, {}};
  throw base::UsageError("lockstep status: " + base::quoted(words.back(), 80) +
                         " is not known; allowed are --json and --help");
}

/// No person types this.
CommandLine parse_agent(const std::vector<std::string>& words) {
  CommandLine command{.subcommand = Subcommand::kAgent};
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--guarded")
      command.agent.guarded = true;
    else if (words[i] == "--attended" && i + 1 < words.size())
      command.agent.slurm_step = words[++i];
    else if (words[i] == "--shipped" && i + 1 < words.size())
      command.agent.staged_program = words[++i];
    else if (words[i] == "--attend" && i + 1 < words.size())
      command.agent.waits_in_step = words[++i];
    else
      throw base::UsageError("lockstep agent: " + base::quoted(words[i], 80) +
                             " is not known; lockstep starts its agents itself");
  }
  return command;
}

}  // namespace

CommandLine parse_command_line(std::vector<std::string> arguments) {
  const std::string subcommand = arguments.empty() ? "" : arguments.front();
  if (subcommand == "run") {
    arguments.erase(arguments.begin());
    return parse_run(std::move(arguments));
  }
  if (subcommand == "doctor") {
    CommandLine command;
    command.doctor = parse_doctor_options({arguments.begin() + 1, arguments.end()}, command.text);
    if (command.text.empty()) command.subcommand = Subcommand::kDoctor;
    return command;
  }
  if (subcommand == "status") return parse_status({arguments.begin() + 1, arguments.end()});
  if (subcommand == "submit") return {Subcommand::kSubmit, {}, "", {arguments.begin() + 1, arguments.end()}};
  if (subcommand == "bench") return {Subcommand::kBench, {}, "", {arguments.begin() + 1, arguments.end()}};
  if (subcommand == "agent") return parse_agent({arguments.begin() + 1, arguments.end()});
  if (subcommand == "--help" || subcommand == "-h" || subcommand == "help") return {Subcommand::kPrint, {}, kUsage, {}};
  if (subcommand == "--version")
    return {Subcommand::kPrint, {}, std::string("lockstep ") + LOCKSTEP_VERSION + "\n", {}};
  throw base::UsageError(
      subcommand.empty()
          ? std::string(
                "lockstep: no command is named; allowed are run, submit, doctor, status, bench, --help and --version")
          : "lockstep: the command is " + base::quoted(subcommand, 80) +
                "; allowed are run, submit, doctor, status, bench, --help and --version");
}

}  // namespace lockstep::launcher
