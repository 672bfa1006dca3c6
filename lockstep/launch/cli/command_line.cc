#include "lockstep/launch/cli/command_line.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "lockstep/base/env.h"
#include "lockstep/base/fd.h"
#include "lockstep/job/health/rank_health.h"
#include "lockstep/job/injection.h"
#include "lockstep/launch/cli/horovodrun.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/cli/option_table.h"

namespace lockstep::launcher::cli {
namespace {

constexpr int kMaxRanks = 4096;
constexpr int kMaxHosts = 65536;
constexpr int kMaxRestarts = 1000000;
constexpr double kMaxRestartPause = 60;  // seconds

const std::vector<std::string> kCommandNames = {"run", "submit", "doctor", "plan", "status", "bench", "build"};
const std::string kCommands = base::alternatives(kCommandNames);

const char* const kUsage =
    "usage: lockstep COMMAND [options]\n"
    "\n"
    "Commands:\n"
    "  run        start N ranks of a program on one or several hosts; end all of them when one fails\n"
    "  submit     write a SLURM batch script that runs a program with lockstep run, and submit it\n"
    "  doctor     check each host for problems before anything is started\n"
    "  plan       predict the steps of a program on several hosts, from some steps on this one\n"
    "  status     print the ranks of the jobs on this host: progress, CPU, memory and current operation\n"
    "  bench      measure this machine: Lockstep compared with Gloo, MPI and PyTorch\n"
    "  build      compile the Python package's extension for a torch or CPython that the wheel lacks\n"
    "\n"
    "Example: lockstep run -n 4 ./train --epochs 3\n"
    "\n"
    "lockstep help COMMAND, or lockstep COMMAND --help, prints the options of a command.\n"
    "lockstep --version prints the version.\n"
    "lockstep --cmake-dir prints the folder of the installed CMake package, for CMAKE_PREFIX_PATH.\n";

const char* const kRunUsage = "lockstep run [options] [--] program [arguments...]";

constexpr std::array kHostSources = {"auto", "slurm", "none"};

using Hosts = OptionType<std::vector<HostSpec>>;

/// Adds -H, --hostfile, --env-from, --remote-path, --connect-timeout, --interface and --cwd in a group of their own.
/// Parsing reads the file that --hostfile names, and throws a FormatError for an error in it.
void add_host_options(OptionTable& table, HostOptions& options, const std::string& example) {
  table.group("Hosts", example);
  table.option(
      "-H,--hosts", options.hosts,
      Hosts{"HOST[:SLOTS],...", [](const std::string&, const std::string& list) { return parse_host_list(list); }},
      "hosts, each with its number of ranks: names or addresses, with USER@ in front if needed, IPv6 in brackets; each "
      "is reached by one ssh connection (default: the hosts of the SLURM allocation or of Kubeflow's mpi runtime, else "
      "this host)");
  table.option(
      "--hostfile", options.hosts,
      Hosts{"FILE", [](const std::string& what, const std::string& file) { return read_host_file(what, file); }},
      "the same from a file with one host per line: host:4 or host slots=4, also port=, user=, path= and interface=; # "
      "starts a comment");
  table.exclude("-H", "--hostfile");
  table.option("--env-from", options.env_from, choice_of("SOURCE", kHostSources),
               "source of the hosts if none are given: {default} (default; SLURM inside an allocation), slurm or none "
               "(this host)");
  table.option("--remote-path", options.remote_path, text("PATH", "the path of lockstep on the other hosts"),
               "path of lockstep on the other hosts (default: its path here)");
  table.option("--connect-timeout", options.connect_timeout, whole_seconds(1, 3600),
               "time limit for ssh to connect to a host (default {default})");
  table.option(
      "--interface", options.interface, checked_text("LIST", parse_interface_filter),
      "network interfaces that ranks use, by name or network, as in eth0 or 10.0.0.0/8; ^docker0 stands for all but "
      "docker0 (default: the interface that routes to this host)");
  table.option("--cwd", options.directory, text("DIR", "a directory"),
               "directory in which the ranks start, on every host (default: this directory)");
}

bool is_gpu_list(std::string_view list) {
  const auto gpus = base::split(list, ',');
  return std::ranges::all_of(gpus, [](const std::string& gpu) {
    return !gpu.empty() && gpu.size() <= 64 && gpu[0] != '-' && base::is_alnum_or(gpu, "-/");
  });
}

bool is_name_of_argument(std::string_view name) { return base::is_alnum_or(name, "_-"); }

void add_program_options(OptionTable& table, RunOptions& run) {
  table.group("What to run", "lockstep run -n 4 ./train --epochs 3");
  table.option("-n,--ranks", run.ranks, integer(1, kMaxRanks),
               "number of ranks, 1 to 4096, also -np (default: all slots of the hosts; a host without slots gets one "
               "rank per visible GPU, else one per physical core)");
  table.list("-x,--export", run.exports,
             text(
                 "NAME[=VALUE]", [](std::string_view variable) { return !variable.empty() && variable[0] != '='; },
                 "NAME or NAME=VALUE"),
             "set this variable for the ranks on all hosts, to VALUE or to its value here; may be repeated");
  table.optional_value("--pass-local-rank", run.local_rank_argument,
                       text("NAME", is_name_of_argument, "letters, digits, '_' and '-'"), "local_rank",
                       "append --local_rank=K, or --NAME=K, to the arguments of the rank with local rank K");
  table.option("--transport", run.transport, choice_of("NAME", base::kTransports), "how ranks exchange data: {values}",
               "auto");
  add_host_options(table, run, "lockstep run -H alpha:4,beta:4 --ship ./train");
  table.flag("--ship", run.ship,
             "copy lockstep, and the folder of a Python script or else a program given as a path, to hosts that lack "
             "them: to ~/.cache/lockstep, compared by content");
  table.internal("--slurm-step", run.slurm_step);  // set by launch() only
}

void add_device_options(OptionTable& table, RunOptions& run) {
  table.group("GPUs and cores", "lockstep run -n 2 --gpus 4,5 python train.py");
  table.option("--gpus", run.gpus, text("LIST", is_gpu_list, "numbers or UUIDs of GPUs, separated by commas"),
               "GPUs that ranks may use, in the form of CUDA_VISIBLE_DEVICES; local rank K uses the K-th");
  table.flag("--isolate-gpus", run.isolate_gpus, "each rank sees its own GPU only, as number 0");
  table.flag("--share-gpus", run.share_gpus,
             "allow more ranks than GPUs, which then share them; over NCCL from 2.30 on");
  table.option("--bind", run.bind,
               choice<Bind>("MODE", {{"auto", Bind::kAuto}, {"cores", Bind::kCores}, {"none", Bind::kNone}}),
               "cores of its own for each rank: {default} (default): unless a Python program would get only one, or a "
               "quota of CPU time is below the cores; "
               "cores: always; none: never");
}

void add_output_options(OptionTable& table, RunOptions& run) {
  table.group("Output", "lockstep run -n 4 --name baseline --output logs --quiet-ranks ./train");
  table.option("--stdin", run.stdin_ranks,
               choice<StdinRanks>(
                   "RANKS", {{"none", StdinRanks::kNone}, {"0", StdinRanks::kRankZero}, {"all", StdinRanks::kAll}}),
               "the ranks that read the standard input of lockstep: {values}; the others read /dev/null");
  table.option("--output", run.output_dir, text("DIR", "the path of a directory"),
               "also write the output of each rank to DIR/rank.N.out and DIR/rank.N.err");
  table.flag("--quiet-ranks", run.quiet_ranks, "print the output of rank 0 only");
  table.option("--name", run.name, plain_name(),
               "name of the run (default: the program's name and the time); a Trainer's files and the stacks of "
               "hanging ranks go to runs/NAME");
  table.flag("--trace", run.trace,
             "let a Trainer write trace.json, for Perfetto and chrome://tracing: the latest steps of all ranks, with "
             "each gradient bucket");
}

void add_failure_options(OptionTable& table, RunOptions& run) {
  const job::health::HealthLimits limits;
  table.group("Failures", "lockstep run -H alpha:4,beta:4 --max-restarts 5 --min-hosts 1 ./train");
  table.option("--grace", run.grace, seconds(),
               "from the first signal to SIGKILL when you stop the job (default {default})");
  table.option(
      "--fail-grace", run.fail_grace, seconds(),
      "from SIGTERM to SIGKILL after a rank has failed, and for processes that outlive their rank (default {default})");
  table.option("--max-restarts", run.max_restarts, integer(0, kMaxRestarts),
               "restart all ranks, at most N times, after failures that may be transient, such as a killed rank or a "
               "lost host (default {default})");
  table.option("--restart-pause", run.restart_pause, seconds(0, kMaxRestartPause),
               "pause before a restart (default {default}); it doubles with each restart, up to 60, and is reset by a "
               "newer checkpoint");
  table.option("--min-hosts", run.min_hosts, integer(1, kMaxHosts).named("M"),
               "restart with fewer ranks if at least M hosts are left; failed hosts are not used for a while (default: "
               "all hosts)");
  table.require("--restart-pause", "--max-restarts");
  table.require("--min-hosts", "--max-restarts");
  table.option("--retry-exit-code", run.retry_exit_code, integer(1, 255),
               "exit code of failures that may be transient, or of a job that was asked to stop, for what starts the "
               "job again (default: that of the cause)");
  table.option("--join-timeout", run.join_timeout, seconds(1e-3),
               "time limit for all ranks to join the job (default {default})", base::kDefaultJoinTimeout);
  table.option("--hang-timeout", run.hang_timeout, seconds(),
               "end the job if no rank makes progress for this long (default {default}; 0: no limit, for a debugger)",
               limits.hang);
  table.option("--work-timeout", run.work_timeout, seconds(),
               "end the job if a rank works for this long without reporting progress while others wait for it (default "
               "{default}; 0: no limit)",
               limits.work);
  table.option("--idle-timeout", run.idle_timeout, seconds(),
               "end the job if no process of any rank uses CPU time for this long; for programs that use neither "
               "Lockstep nor torch.distributed (default {default}: no limit)");
  table.option("--stall-timeout", run.stall_timeout, seconds(),
               "end the job if a rank sends no heartbeat for this long (default {default}; 0: no limit)", limits.stall);
  table.option("--host-timeout", run.host_timeout, whole_seconds(1, 3600),
               "end the job if one host receives no packet from another for this long (1 to 3600, default {default}); "
               "a shorter cut of the network only delays the job",
               base::kPeerHostTimeout);
}

void add_run_options(OptionTable& table, RunOptions& run) {
  add_program_options(table, run);
  add_device_options(table, run);
  add_output_options(table, run);
  add_failure_options(table, run);
  table.group("Testing", "lockstep run -n 4 --inject kill@rank=2,step=100 ./train");
  table.option("--inject", run.inject,
               checked_text("KIND@rank=R,step=S",
                            [](const char* what, const std::string& fault) { job::parse_injection(what, fault); }),
               "inject a fault into rank R's S-th gradient reduction; KIND is kill, stop, segv, loop, throw, desync, "
               "corrupt (a NaN in a gradient), flip (one bit of a mean) or slow");
  table.footer(
      "Each line of a rank's output begins with [rank]. The exit code is that of the first rank that failed, or 128 + "
      "N if signal N ended it; 64 means that nothing was started. Ctrl-C stops all ranks, and a second Ctrl-C kills "
      "them.");
}

CommandLine parse_run(std::vector<std::string> words) {
  CommandLine command;
  OptionTable table("lockstep run", kRunUsage,
                    "Starts N ranks of a program on one or several hosts, and ends all of them when one fails.");
  add_run_options(table, command.run);
  auto program = table.parse(std::move(words));
  if (!program) return {.text = table.help()};
  command.run.command = std::move(*program);
  if (command.run.command.empty() || command.run.command.front().empty())
    throw table.error(std::string("no program given; expected ") + kRunUsage);
  command.subcommand = Subcommand::kRun;
  return command;
}

// Decimal, as is usual for network traffic.
constexpr std::pair<char, std::int64_t> kUnits[] = {{'G', 1'000'000'000}, {'M', 1'000'000}, {'K', 1'000}};

/// A number of bytes such as "250M".
OptionType<std::uint64_t> bytes() {
  const auto parse = [](const std::string& what, const std::string& text) {
    constexpr std::int64_t kMaxBytes = std::int64_t{1} << 50;
    std::string digits = text;
    std::int64_t unit = 1;
    for (const auto& [suffix, factor] : kUnits)
      if (text.ends_with(suffix)) unit = factor;
    if (unit > 1) digits.pop_back();
    const auto number = base::parse_int(digits);
    check_value(number && *number >= 1 && *number <= kMaxBytes / unit, what, text,
                "1 or more bytes, or a number with the suffix K, M or G: 250M is 250,000,000");
    return static_cast<std::uint64_t>(*number * unit);
  };
  const auto print = [](std::uint64_t value) {
    for (const auto& [suffix, factor] : kUnits)
      if (value % static_cast<std::uint64_t>(factor) == 0)
        return std::to_string(value / static_cast<std::uint64_t>(factor)) + suffix;
    return std::to_string(value);
  };
  return {"N", parse, print};
}

constexpr const char* kDoctorUsage = "lockstep doctor [options] [--] [program [arguments...]]";

CommandLine parse_doctor(std::vector<std::string> words) {
  CommandLine command_line;
  DoctorOptions& options = command_line.doctor;
  OptionTable table("lockstep doctor", kDoctorUsage,
                    "Checks each host for problems that would keep a program from running there, and prints a remedy "
                    "for each. Starts and changes nothing.");
  table.group("What to check", "lockstep doctor --model-bytes 14G ./train");
  table.flag("--mpi", options.mpi, "also check what mpirun needs on each host");
  table.option("--model-bytes", options.model_bytes, bytes(),
               "gradient bytes that one step sends, to estimate the network cost; K, M and G are decimal (default "
               "{default})");
  add_host_options(table, options, "lockstep doctor -H alpha:4,beta:4 ./train");
  table.group("Output", "lockstep doctor --hostfile hosts --json ./train");
  table.flag("--json", options.json, "print one JSON object with all findings");
  table.flag(
      "--report", options.report,
      "print what a bug report needs, to be pasted: system, versions, devices, findings and the FATAL line of the "
      "last job that failed on this host; no variables of the environment (default program: python3)");
  table.exclude("--json", "--report");
  table.footer("The exit code is 0 if there is no problem and 1 if there is one; 64 means that no host was checked.");
  auto command = table.parse(std::move(words));
  if (!command) return {.text = table.help()};
  options.command = std::move(*command);
  if (!options.command.empty() && options.command.front().empty())
    throw table.error(std::string("the program is \"\"; expected ") + kDoctorUsage);
  command_line.subcommand = Subcommand::kDoctor;
  return command_line;
}

/// Numbers separated by commas, each with one of `units` behind it.
OptionType<std::vector<double>> quantities(std::string name, std::vector<std::pair<std::string, double>> units,
                                           double low, double high, std::string expected) {
  const auto parse_one = [=](const std::string& word) -> std::optional<double> {
    for (const auto& [unit, factor] : units) {
      if (!word.ends_with(unit)) continue;
      const auto number = base::parse_double(word.substr(0, word.size() - unit.size()));
      if (number && *number * factor >= low && *number * factor <= high) return *number * factor;
    }
    return std::nullopt;
  };
  return {std::move(name), [=](const std::string& what, const std::string& list) {
            std::vector<double> values;
            for (const std::string& word : base::split(list, ',')) {
              const auto value = parse_one(word);
              check_value(value.has_value() && values.size() < 64, what, list, expected);
              values.push_back(*value);
            }
            return values;
          }};
}

constexpr const char* kPlanUsage = "lockstep plan [options] [--] program [arguments...]";

CommandLine parse_plan(std::vector<std::string> words) {
  CommandLine command_line;
  PlanOptions& options = command_line.plan;
  OptionTable table(
      "lockstep plan", kPlanUsage,
      "Predicts how long a step of a program takes on several hosts: runs it on this host for some steps, "
      "ends it, and computes what the exchange between hosts adds, for each network and each method. The "
      "program needs a DistributedDataParallel of Lockstep or of torch. It runs in a temporary folder with "
      "links to the files of this one. It does not resume from its checkpoints, and what it saves is "
      "removed with that folder.");
  table.group("What to run", "lockstep plan -n 4 --nodes 2,8 --link 1g,10g -- python train.py");
  table.option("-n,--ranks,--ranks-per-node", options.ranks, integer(1, kMaxRanks),
               "ranks of each host, all of which run on this one (default: one per GPU, else one per core)");
  table.option("--gpus", options.gpus, text("LIST", is_gpu_list, "numbers or UUIDs of GPUs, separated by commas"),
               "GPUs that ranks may use, as in lockstep run");
  table.option(
      "--steps", options.steps, integer(3, 100000),
      "least number of steps to record, after 5 that are not; more if they take less than 3 s (default {default})");
  table.option("--start-timeout", options.start_timeout, whole_seconds(1, 86400),
               "time limit for the program to make its first step (default {default})");
  table.group("Clusters", "lockstep plan --nodes 2,4,8,128 --link 100m,1g,10g,100g --latency 50us -- ./train");
  table.option(
      "--nodes", options.nodes,
      OptionType<std::vector<int>>{"N,...",
                                   [](const std::string& what, const std::string& list) {
                                     std::vector<int> values;
                                     for (const std::string& word : base::split(list, ',')) {
                                       const auto number = base::parse_int(word);
                                       check_value(number && *number >= 1 && *number <= kMaxHosts && values.size() < 64,
                                                   what, list, "numbers of hosts, 1 to 65536, separated by commas");
                                       values.push_back(static_cast<int>(*number));
                                     }
                                     return values;
                                   }},
      "numbers of hosts (default 2,4,8)");
  table.option("--link", options.links,
               quantities("RATE,...", {{"m", 1e6}, {"g", 1e9}, {"M", 1e6}, {"G", 1e9}}, 1e5, 1e13,
                          "rates in bits per second such as 100m or 10g, separated by commas"),
               "bits per second that each host sends and receives (default 100m,1g,10g)");
  std::vector<double> latency;
  table.option("--latency", latency,
               quantities("TIME", {{"us", 1e-6}, {"ms", 1e-3}}, 0, 10, "a time such as 50us or 20ms"),
               "time of a small message between two hosts, half of what ping prints (default 50us)");
  table.option("--every", options.every, integer(1, 1000000),
               "steps between two exchanges of average, DiLoCo and SparseLoCo (default {default})");
  table.group("Output", "lockstep plan --json -- ./train");
  table.flag("--json", options.json, "print one JSON object with the recorded steps and all predictions");
  table.footer(
      "The exit code is 0, or that of the program if it fails; 64 means that nothing was started, or that the program "
      "made no steps that can be read.");
  auto command = table.parse(std::move(words));
  if (!command) return {.text = table.help()};
  options.command = std::move(*command);
  if (options.command.empty() || options.command.front().empty())
    throw table.error(std::string("no program given; expected ") + kPlanUsage);
  if (latency.size() > 1) throw table.error("--latency has several times; expected one");
  if (!latency.empty()) options.latency_s = latency.front();
  command_line.subcommand = Subcommand::kPlan;
  return command_line;
}

CommandLine parse_status(std::vector<std::string> words) {
  CommandLine command{.subcommand = Subcommand::kStatus};
  OptionTable table(
      "lockstep status", "lockstep status [--json]",
      "Prints the ranks of your jobs: those that lockstep run has started from this host, on all their hosts, and "
      "those on this host, whichever launcher started them. A rank may run any program.\n"
      "\n"
      "For each rank: the process and its state; its CPU time in percent of one core, over the last 0.5 to 2 s; and "
      "its resident memory (rss). For a rank in which lockstep::init() has returned, also: the number of gradient "
      "reductions that it has started; the memory of its arena, which the other ranks of the host read, in use, at its "
      "peak and resident; its current operation with the time spent in it, the last operation that finished, and the "
      "ranks that have not arrived. For other ranks, the state is \"no init() yet\": they run another program, or are "
      "still starting.");
  table.group("Options", "lockstep status --json");
  table.flag("--json", command.json, "print one JSON object per rank and line, with sizes in bytes");
  return table.parse_options_only(std::move(words)) ? command : CommandLine{.text = table.help()};
}

CommandLine parse_build(std::vector<std::string> words) {
  CommandLine command{.subcommand = Subcommand::kBuild};
  OptionTable table(
      "lockstep build", "lockstep build [--python PYTHON]",
      "Compiles the extension of the Python package for the torch and the CPython of PYTHON, from the sources in the "
      "package, and installs it beside the package, or in ~/.cache/lockstep if that folder cannot be written. import "
      "lockstep then uses it with exactly this version of torch.\n"
      "\n"
      "It is needed for a torch that the wheel has no extension for: NVIDIA's, conda-forge's or your own build. It "
      "takes about 6 minutes of one core, and needs a C++20 compiler (CXX, or c++ in PATH) and the headers of CPython. "
      "cmake and ninja are taken from PyPI, for this build alone, if the machine lacks them; nothing else uses the "
      "network.");
  table.group("Options", "lockstep build --python env/bin/python");
  table.option("--python", command.python, text("PYTHON", "an interpreter of Python"),
               "the Python with this torch, by name or path (default: the one beside lockstep, else python3 in PATH)");
  return table.parse_options_only(std::move(words)) ? command : CommandLine{.text = table.help()};
}

/// Parses the options of `lockstep agent`, which only the launcher executes.
CommandLine parse_agent(std::vector<std::string> words) {
  CommandLine command{.subcommand = Subcommand::kAgent};
  OptionTable table("lockstep agent", "lockstep agent [options]",
                    "Runs the agent of a host; lockstep run starts the agents itself.");
  table.group("Options", "lockstep agent");
  table.flag("--guarded", command.agent.guarded, "");
  table.flag("--in-pod", command.agent.in_pod, "");
  table.internal("--slurm-step", command.agent.slurm_step);
  table.internal("--staged-program", command.agent.staged_program);
  table.internal("--staged-script", command.agent.staged_script);
  table.internal("--staged-hook", command.agent.staged_hook);
  table.internal("--wait-in-step", command.agent.waits_in_step);
  return table.parse_options_only(std::move(words)) ? command : CommandLine{.text = table.help()};
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
  if (subcommand == "doctor") return parse_doctor(std::move(arguments));
  if (subcommand == "plan") return parse_plan(std::move(arguments));
  if (subcommand == "status") return parse_status(arguments);
  if (subcommand == "submit") return {Subcommand::kSubmit, {}, "", std::move(arguments)};
  if (subcommand == "bench") return {Subcommand::kBench, {}, "", std::move(arguments)};
  if (subcommand == "build") return parse_build(std::move(arguments));
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
