#include "lockstep/launch/cli/submit_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cctype>
#include <functional>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/cli/help_layout.h"
#include "lockstep/launch/cli/option_parsing.h"

namespace lockstep::launcher::cli {
namespace {

constexpr int kMaxTotalRanks = 4096;  // the limit of lockstep run
constexpr int kMaxNodes = 4096;
constexpr int kMaxPerNode = 1024;
constexpr int kMaxSignalBefore = 65535;      // SLURM's limit
constexpr std::size_t kMaxGridTasks = 1000;  // SLURM's default for MaxArraySize, less one
constexpr const char* kSubmitUsage = "lockstep submit [options] [--] program [arguments...]";
constexpr const char* kResourceGroup = "Resources";
constexpr const char* kJobGroup = "Job";
constexpr const char* kCommandGroup = "How to run the program";
constexpr const char* kScriptGroup = "Output";

// The options of sbatch 22.05 that never take the next word as a value.
constexpr std::array<std::string_view, 23> kSbatchFlags = {"--contiguous",
                                                           "--exclusive",
                                                           "--get-user-env",
                                                           "--hold",
                                                           "--ignore-pbs",
                                                           "--nice",
                                                           "--no-kill",
                                                           "--overcommit",
                                                           "--oversubscribe",
                                                           "--propagate",
                                                           "--quiet",
                                                           "--reboot",
                                                           "--spread-job",
                                                           "--use-min-nodes",
                                                           "--verbose",
                                                           "--no-bell",
                                                           "--share",
                                                           "-H",
                                                           "-k",
                                                           "-O",
                                                           "-Q",
                                                           "-s",
                                                           "-v"};

struct RefusedOption {
  std::string_view option;
  std::string_view remedy;
};
// Options of sbatch that users cannot give, because the script or `lockstep submit` sets them.
constexpr std::array<RefusedOption, 9> kRefusedOptions = {
    {{"-o", "use --output DIR, which names a directory"},
     {"-D", "submit from that directory"},
     {"--chdir", "submit from that directory"},
     {"--open-mode", "a job that is requeued appends to its file"},
     {"--signal", "use --signal-before SECONDS"},
     {"--test-only", "use --dry-run"},
     {"-W", "use --follow"},
     {"--wait", "use --follow"},
     {"--wrap", "name the program after the options"}}};

/// The options as text. The functions below check the values, so that all messages have the same form.
struct RawSubmitOptions {
  std::string ranks, ranks_per_node, cpus_per_rank, signal_before;
  std::vector<std::string> grid;
  bool requeue = false, no_requeue = false;
};

void declare_resource_options(CLI::App& app, RawSubmitOptions& raw, SubmitOptions& submit) {
  begin_option_group(app, kResourceGroup);
  app.set_help_flag("-h,--help", "show this text");
  declare_option(app, "-N,--nodes", submit.nodes, "N", "number of nodes, or MIN-MAX");
  declare_option(app, "--ranks-per-node,--ntasks-per-node", raw.ranks_per_node, "N",
                 "ranks on each node (default: one per GPU if GPUs are requested, else as lockstep run chooses)");
  declare_option(app, "-n,--ranks,--ntasks", raw.ranks, "N", "total number of ranks, in place of --ranks-per-node");
  declare_option(app, "--gpus-per-node", submit.gpus_per_node, "[TYPE:]N", "GPUs on each node");
  declare_option(app, "-c,--cpus-per-rank,--cpus-per-task", raw.cpus_per_rank, "N", "cores for each rank");
  declare_option(app, "--mem", submit.mem, "N[KMGT]", "memory of each node, in megabytes without a suffix; 0: all");
}

void declare_job_options(CLI::App& app, RawSubmitOptions& raw, SubmitOptions& submit) {
  begin_option_group(app, kJobGroup);
  declare_option(app, "-t,--time", submit.time, "LIMIT",
                 "time limit, after which SLURM ends the job: minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s");
  declare_option(app, "-p,--partition", submit.partition, "NAME", "partition in which the job is queued");
  declare_option(app, "-A,--account", submit.account, "NAME", "account to which the job is charged");
  declare_option(app, "-a,--array", submit.array, "INDICES",
                 "submit one job for each of 0-15, 1,3,7 or 0-15:4; %4 after the indices runs at most four at once");
  app.add_option(
         "--grid", raw.grid,
         "submit one job for each combination of these values, with --NAME=VALUE after the program's arguments; "
         "may be repeated")
      ->type_name("NAME=VALUE,...")
      ->allow_extra_args(false);
  declare_option(app, "-J,--name,--job-name", submit.name, "NAME", "name of the job (default: the program's name)");
  declare_option(app, "--mail", submit.mail, "ADDRESS", "send mail when the job ends, fails or is requeued");
  app.add_flag("--requeue", raw.requeue, "requeue the job if it ends with exit code 75 (default)");
  app.add_flag("--no-requeue", raw.no_requeue, "never requeue the job");
  declare_option(app, "--signal-before", raw.signal_before, "SECONDS",
                 "send SIGUSR1 to the ranks this long before the time limit, so that they save and exit (default 120, "
                 "at most a quarter of --time; 0: no signal)");
}

void declare_command_options(CLI::App& app, SubmitOptions& submit) {
  begin_option_group(app, kCommandGroup);
  declare_option(app, "--remote-path", submit.remote_path, "PATH",
                 "path of lockstep on the nodes (default: its path here)");
  app.add_option("--before", submit.before,
                 "a command that the script runs first, as in --before 'module load cuda'; may be repeated")
      ->type_name("COMMAND")
      ->allow_extra_args(false);
  app.add_option("--run", submit.run_options,
                 "pass an option to lockstep run, as in --run=--hang-timeout=600; may be repeated")
      ->type_name("WORD")
      ->allow_extra_args(false);
}

void declare_script_options(CLI::App& app, SubmitOptions& submit) {
  begin_option_group(app, kScriptGroup);
  declare_option(app, "--output", submit.output, "DIR",
                 "directory of the logs (default: logs): the job's output DIR/JOB.out, the script DIR/JOB.sh, and "
                 "DIR/JOB/rank.N.out and .err");
  app.add_flag("--dry-run", submit.dry_run, "print the script and do not submit it");
  app.add_flag("--follow", submit.follow,
               "print the job's output until it ends, and exit with its exit code; Ctrl-C does not stop the job");
}

void declare_submit_options(CLI::App& app, RawSubmitOptions& raw, SubmitOptions& submit) {
  declare_resource_options(app, raw, submit);
  declare_job_options(app, raw, submit);
  declare_command_options(app, submit);
  declare_script_options(app, submit);
  app.footer(
      "All other options are passed on to sbatch, in the script. Attach their values, as in --qos=high; if a value is "
      "a separate word, as in --constraint gpu, write -- before the program. SBATCH_* variables do not override the "
      "script.");
  set_help_layout(app,
                  {.usage = kSubmitUsage,
                   .examples = {
                       {kResourceGroup, "lockstep submit --nodes 16 --gpus-per-node 8 --time 4:00:00 -- ./train"},
                       {kJobGroup, "lockstep submit --nodes 2 --time 90 --partition gpu --array 0-15%4 -- ./train"},
                       {kJobGroup, "lockstep submit --nodes 2 --grid lr=0.1,0.01 --grid seed=1,2,3 -- ./train"},
                       {kCommandGroup, "lockstep submit --nodes 2 --run=--max-restarts=3 -- python train.py"},
                       {kCommandGroup, "lockstep submit --before 'source venv/bin/activate' -- python train.py"},
                       {kScriptGroup, "lockstep submit --nodes 2 --output logs --follow -- ./train"},
                   }});
}

bool is_option(const std::string& word) { return word.size() > 1 && word[0] == '-' && word != "--"; }

/// Returns "--qos" for "--qos=high", and "-w" for "-wn1".
std::string option_name(const std::string& word) {
  return word[1] == '-' ? word.substr(0, word.find('=')) : word.substr(0, 2);
}

/// The command line, split into its three parts.
struct SplitArguments {
  std::vector<std::string> own_options;  ///< each value is attached, so that CLI11 does not take it for an option
  std::vector<std::vector<std::string>> sbatch_options;
  std::vector<std::string> command;
};

std::vector<std::string> parse_sbatch_option(const std::vector<std::string>& words, std::size_t at) {
  const std::string& word = words[at];
  const std::string name = option_name(word);
  for (const RefusedOption& refused : kRefusedOptions)
    if (name == refused.option)
      throw base::UsageError("lockstep submit: " + name + " is not passed on to sbatch; " +
                             std::string(refused.remedy));
  const bool alone = name != word || std::find(kSbatchFlags.begin(), kSbatchFlags.end(), name) != kSbatchFlags.end();
  if (alone || at + 1 == words.size() || words[at + 1].starts_with('-')) return {word};
  const std::string& next = words[at + 1];
  if (next.empty())
    throw base::UsageError("lockstep submit: " + base::quoted(word, 80) + " is \"\"; expected a non-empty value");
  if (std::find(words.begin() + static_cast<std::ptrdiff_t>(at) + 2, words.end(), "--") != words.end())
    return {word, next};
  throw base::UsageError("lockstep submit: " + base::quoted(next, 80) + " may be the value of the sbatch option " +
                         base::quoted(word, 80) + " or the program; expected " +
                         base::quoted(word + (word[1] == '-' ? "=" : "") + next, 160) + ", or -- before the program");
}

/// Returns the option of `lockstep submit` at index `at` in the form "--name=value" that CLI11 parses. Advances `at` to
/// the value if that is a separate word.
std::string parse_own_option(const CLI::Option& option, const std::vector<std::string>& words, std::size_t& at) {
  const std::string& word = words[at];
  const std::string name = "--" + option.get_lnames().front();
  std::string value = word.substr(option_name(word).size());
  if (word[1] == '-' && !value.empty()) value.erase(0, 1);
  if (option.get_items_expected_max() == 0) return option_name(word) == word ? name : word;
  if (word == option_name(word)) {
    if (++at == words.size())
      throw base::UsageError("lockstep submit: " + word + " has no value; expected one after it");
    value = words[at];
  }
  if (value.empty()) throw base::UsageError(name + " is \"\"; expected a non-empty value");
  return name + "=" + value;
}

SplitArguments split_arguments(const CLI::App& app, const std::vector<std::string>& words) {
  SplitArguments parts;
  std::size_t at = 0;
  for (; at < words.size() && is_option(words[at]); ++at) {
    if (const CLI::Option* option = app.get_option_no_throw(option_name(words[at]))) {
      parts.own_options.push_back(parse_own_option(*option, words, at));
    } else {
      parts.sbatch_options.push_back(parse_sbatch_option(words, at));
      at += parts.sbatch_options.back().size() - 1;
    }
  }
  if (at < words.size() && words[at] == "--") ++at;
  parts.command.assign(words.begin() + static_cast<std::ptrdiff_t>(std::min(at, words.size())), words.end());
  return parts;
}

bool is_number(std::string_view text, std::size_t max_digits = 9) {
  return !text.empty() && text.size() <= max_digits &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
}

bool is_array(std::string_view text) {
  const auto pieces = base::split(text, '%');
  if (pieces.size() > 2 || (pieces.size() == 2 && !is_number(pieces[1]))) return false;
  for (const std::string& piece : base::split(pieces[0], ',')) {
    const auto ends_and_step = base::split(piece, ':');
    const auto ends = base::split(ends_and_step[0], '-');
    if (ends_and_step.size() > 2 || ends.size() > 2 ||
        (ends_and_step.size() == 2 && (ends.size() == 1 || !is_number(ends_and_step[1]))))
      return false;
    if (!std::all_of(ends.begin(), ends.end(), [](const std::string& end) { return is_number(end); })) return false;
  }
  return true;
}

bool is_memory(std::string_view text) {
  if (!text.empty() && std::string_view("KMGTkmgt").find(text.back()) != std::string_view::npos) text.remove_suffix(1);
  return is_number(text, 12);
}

/// Returns whether `text` has no control characters.
bool has_no_controls(std::string_view text) {
  return std::none_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

/// Returns whether `text` is not empty and has no spaces and no control characters.
bool is_word(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return c > 0x20 && c != 0x7f; });
}

bool is_plain_name(std::string_view text) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-' || c == '.'; };
  return !text.empty() && text.size() <= 128 && text[0] != '.' && text[0] != '-' &&
         std::all_of(text.begin(), text.end(), allowed);
}

void check(bool good, const char* what, const std::string& got, const std::string& expected) {
  if (!good) throw base::UsageError(std::string(what) + " is " + base::quoted(got, 80) + "; expected " + expected);
}

void check_nodes(const std::string& nodes) {
  const auto ends = base::split(nodes, '-');
  const auto good = [](const std::string& end) {
    return is_number(end) && std::stoi(end) >= 1 && std::stoi(end) <= kMaxNodes;
  };
  check(ends.size() <= 2 && std::all_of(ends.begin(), ends.end(), good) &&
            std::stoi(ends.front()) <= std::stoi(ends.back()),
        "--nodes", nodes, "an integer from 1 to " + std::to_string(kMaxNodes) + ", or MIN-MAX");
}

/// Returns the number of GPUs: 8 for "8" and for "a100:8".
int num_gpus(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string number = colon == std::string::npos ? text : text.substr(colon + 1);
  check(is_number(number) && std::stoi(number) >= 1 && std::stoi(number) <= kMaxPerNode &&
            (colon == std::string::npos || is_plain_name(text.substr(0, colon))),
        "--gpus-per-node", text, "an integer from 1 to " + std::to_string(kMaxPerNode) + ", or TYPE:N");
  return std::stoi(number);
}

void check_texts(const SubmitOptions& submit, const std::function<bool(const char*)>& given) {
  if (given("--nodes")) check_nodes(submit.nodes);
  if (given("--mem"))
    check(is_memory(submit.mem), "--mem", submit.mem, "a number with an optional suffix K, M, G or T");
  if (given("--time"))
    check(parse_time_limit(submit.time).has_value(), "--time", submit.time,
          "minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s, as in 90, 4:00:00 or 1-12");
  if (given("--partition")) check(is_word(submit.partition), "--partition", submit.partition, "a name without spaces");
  if (given("--account")) check(is_word(submit.account), "--account", submit.account, "a name without spaces");
  if (given("--array"))
    check(is_array(submit.array), "--array", submit.array, "indices, as in 0-15, 1,3,7, 0-15:4 or 0-15%4");
  if (given("--name"))
    check(is_plain_name(submit.name), "--name", submit.name,
          "1 to 128 letters, digits, '_', '-' and '.', beginning with a letter, a digit or '_'");
  if (given("--mail")) check(is_word(submit.mail), "--mail", submit.mail, "an address without spaces");
  for (const std::string& command : submit.before)
    check(has_no_controls(command), "--before", command, "one command on one line");
  // A backslash in a file name makes SLURM ignore the patterns in it.
  check(has_no_controls(submit.output) && submit.output.find('\\') == std::string::npos, "--output", submit.output,
        "a directory name without line breaks and backslashes");
  for (const auto& words : submit.sbatch_options)
    for (const std::string& word : words) check(has_no_controls(word), "an sbatch option", word, "one line");
}

void check_numbers(const RawSubmitOptions& raw, SubmitOptions& submit, const std::function<bool(const char*)>& given) {
  const auto number = [&](const char* name, const std::string& text, int& value, int low, int high) {
    if (given(name)) value = static_cast<int>(base::parse_int_in_range(name, text, low, high));
  };
  number("--ranks", raw.ranks, submit.ranks, 1, kMaxTotalRanks);
  number("--ranks-per-node", raw.ranks_per_node, submit.ranks_per_node, 1, kMaxPerNode);
  number("--cpus-per-rank", raw.cpus_per_rank, submit.cpus_per_rank, 1, 1 << 16);
  if (given("--gpus-per-node")) {
    const int gpus = num_gpus(submit.gpus_per_node);
    if (submit.ranks == 0 && submit.ranks_per_node == 0) submit.ranks_per_node = gpus;
  }
  // A limit of 0 means no limit.
  const std::int64_t limit = parse_time_limit(submit.time).value_or(0);
  if (limit > 0) submit.signal_before = static_cast<int>(std::min<std::int64_t>(submit.signal_before, limit / 4));
  number("--signal-before", raw.signal_before, submit.signal_before, 0, kMaxSignalBefore);
  if (limit > 0 && submit.signal_before >= limit)
    throw base::UsageError("--signal-before is " + std::to_string(submit.signal_before) + ", but --time " +
                           base::quoted(submit.time, 80) + " is " + std::to_string(limit) +
                           " s; expected fewer seconds");
}

/// Returns the arguments of each task of the array: all combinations, in the order in which they are written.
std::vector<std::vector<std::string>> parse_grid(const std::vector<std::string>& axes) {
  const auto is_name = [](std::string_view name) {
    return is_plain_name(name) && !std::isdigit(static_cast<unsigned char>(name[0]));
  };
  std::vector<std::vector<std::string>> tasks = {{}};
  for (const std::string& axis : axes) {
    const std::size_t equals = axis.find('=');
    const std::string name = axis.substr(0, equals);
    const auto values = base::split(equals == std::string::npos ? "" : axis.substr(equals + 1), ',');
    check(is_name(name) && std::none_of(values.begin(), values.end(), [](const auto& one) { return one.empty(); }),
          "--grid", axis, "NAME=VALUE,VALUE, as in lr=0.1,0.01");
    std::vector<std::vector<std::string>> all;
    for (const auto& task : tasks) {
      for (const std::string& value : values) {
        all.push_back(task);
        all.back().push_back("--" + name + "=" + value);
      }
      check(all.size() <= kMaxGridTasks, "--grid", axis, "at most " + std::to_string(kMaxGridTasks) + " combinations");
    }
    tasks = std::move(all);
  }
  return tasks;
}

void set_grid(const std::vector<std::string>& axes, SubmitOptions& submit) {
  if (!submit.array.empty())
    throw base::UsageError("lockstep submit: both --grid and --array are given; expected one of them");
  submit.grid = parse_grid(axes);
  submit.array = "0-" + std::to_string(submit.grid.size() - 1);
}

/// Checks the options for `lockstep run`, so that a mistake is reported now and not when the job starts.
void check_options_for_run(const SubmitOptions& submit) {
  std::vector<std::string> words = {"run"};
  words.insert(words.end(), submit.run_options.begin(), submit.run_options.end());
  words.insert(words.end(), {"--", "program"});
  const CommandLine command = parse_command_line(words);
  if (command.subcommand != Subcommand::kRun || command.run.command != std::vector<std::string>{"program"})
    throw base::UsageError("--run is " + base::quoted(submit.run_options.back(), 80) +
                           "; expected options of lockstep run and their values");
  if (!command.run.output_dir.empty())
    throw base::UsageError("--run is \"--output\"; expected the option --output of lockstep submit, which sets it");
}

/// Returns "my_train.py" for "bin/my train.py".
std::string job_name_for(const std::string& program) {
  std::string name = program.substr(program.rfind('/') + 1).substr(0, 128);
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != '-' && c != '.') c = '_';
  return is_plain_name(name) ? name : "lockstep";
}

void check_all(const CLI::App& app, const RawSubmitOptions& raw, SubmitOptions& submit) {
  const auto given = [&](const char* name) { return app.get_option(name)->count() > 0; };
  check_texts(submit, given);
  if (given("--ranks") && given("--ranks-per-node"))
    throw base::UsageError("lockstep submit: both --ranks and --ranks-per-node are given; expected one of them");
  check_numbers(raw, submit, given);
  if (raw.requeue && raw.no_requeue)
    throw base::UsageError("lockstep submit: both --requeue and --no-requeue are given; expected one of them");
  submit.requeue = !raw.no_requeue;
  if (!raw.grid.empty()) set_grid(raw.grid, submit);
  if (submit.follow && !submit.array.empty())
    throw base::UsageError(std::string("lockstep submit: both --follow and ") +
                           (submit.grid.empty() ? "--array" : "--grid") +
                           " are given, but an array is several jobs; expected one of them");
  if (!submit.run_options.empty()) check_options_for_run(submit);
  if (submit.command.empty() || submit.command.front().empty())
    throw base::UsageError(std::string("lockstep submit: no program given; expected ") + kSubmitUsage);
  if (submit.name.empty()) submit.name = job_name_for(submit.command.front());
}

}  // namespace

std::optional<std::int64_t> parse_time_limit(std::string_view text) {
  const std::size_t dash = text.find('-');
  const bool has_days = dash != std::string_view::npos;
  const auto fields = base::split(has_days ? text.substr(dash + 1) : text, ':');
  if (fields.size() > 3 ||
      !std::all_of(fields.begin(), fields.end(), [](const std::string& field) { return is_number(field); }))
    return std::nullopt;
  if (has_days && !is_number(text.substr(0, dash))) return std::nullopt;
  // The unit of the first field in seconds. After days, it is hours.
  std::int64_t unit = has_days || fields.size() == 3 ? 3600 : 60;
  std::int64_t seconds = has_days ? 86400LL * std::stoll(std::string(text.substr(0, dash))) : 0;
  for (const std::string& field : fields) {
    seconds += unit * std::stoll(field);
    unit /= 60;
  }
  return seconds;
}

SubmitCommand parse_submit_options(std::vector<std::string> words) {
  SubmitCommand submission;
  RawSubmitOptions raw;
  CLI::App app(
      "Writes a SLURM batch script that starts N ranks of a program with lockstep run, prints it and submits it.");
  declare_submit_options(app, raw, submission.options);
  SplitArguments parts = split_arguments(app, words);
  std::reverse(parts.own_options.begin(), parts.own_options.end());  // the order that CLI11 expects
  try {
    app.parse(parts.own_options);
  } catch (const CLI::CallForHelp&) {
    submission.help = app.help();
    return submission;
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what();
    throw base::UsageError("lockstep submit: " + text.substr(0, text.find('\n')) + "; see lockstep submit --help");
  }
  submission.options.sbatch_options = std::move(parts.sbatch_options);
  submission.options.command = std::move(parts.command);
  check_all(app, raw, submission.options);
  return submission;
}

}  // namespace lockstep::launcher::cli
