#include "lockstep/launch/cli/submit_options.h"

#include <algorithm>
#include <cctype>

#include "lockstep/launch/cli/command_line.h"
#include "lockstep/launch/cli/option_table.h"

namespace lockstep::launcher::cli {
namespace {

constexpr int kMaxTotalRanks = 4096;  // the limit of lockstep run
constexpr int kMaxNodes = 4096;
constexpr int kMaxPerNode = 1024;
constexpr int kMaxSignalBefore = 65535;      // SLURM's limit
constexpr std::size_t kMaxGridTasks = 1000;  // SLURM's default for MaxArraySize, less one
constexpr const char* kSubmitUsage = "lockstep submit [options] [--] program [arguments...]";
// The options of sbatch 22.05 that never take the next word as a value.
constexpr std::string_view kSbatchFlags =
    "--contiguous,--exclusive,--get-user-env,--hold,--ignore-pbs,--nice,--no-kill,--overcommit,--oversubscribe,"
    "--propagate,--quiet,--reboot,--spread-job,--use-min-nodes,--verbose,--no-bell,--share,-H,-k,-O,-Q,-s,-v";

// Options of sbatch that users cannot give, because the script or `lockstep submit` sets them, with the remedies.
constexpr std::pair<std::string_view, std::string_view> kRefusedOptions[] = {
    {"-o", "use --output DIR, which names a directory"},
    {"-D", "submit from that directory"},
    {"--chdir", "submit from that directory"},
    {"--open-mode", "a job that is requeued appends to its file"},
    {"--signal", "use --signal-before SECONDS"},
    {"--test-only", "use --dry-run"},
    {"-W", "use --follow"},
    {"--wait", "use --follow"},
    {"--wrap", "name the program after the options"}};

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
  for (const auto& [refused, remedy] : kRefusedOptions)
    if (name == refused)
      throw base::UsageError("lockstep submit: " + name + " is not passed on to sbatch; " + std::string(remedy));
  const auto flags = base::split(kSbatchFlags, ',');
  const bool alone = name != word || std::ranges::find(flags, name) != flags.end();
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
std::string parse_own_option(const OptionTable::Found& option, const std::vector<std::string>& words, std::size_t& at) {
  const std::string& word = words[at];
  std::string value = word.substr(option_name(word).size());
  if (word[1] == '-' && !value.empty()) value.erase(0, 1);
  if (!option.takes_value) return option_name(word) == word ? option.name : word;
  if (word == option_name(word)) {
    if (++at == words.size())
      throw base::UsageError("lockstep submit: " + word + " has no value; expected one after it");
    value = words[at];
  }
  if (value.empty()) throw base::UsageError(option.name + " is \"\"; expected a non-empty value");
  return option.name + "=" + value;
}

SplitArguments split_arguments(const OptionTable& table, const std::vector<std::string>& words) {
  SplitArguments parts;
  std::size_t at = 0;
  for (; at < words.size() && is_option(words[at]); ++at) {
    if (const auto option = table.find(option_name(words[at]))) {
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
         std::ranges::all_of(text, [](unsigned char c) { return std::isdigit(c); });
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
    if (!std::ranges::all_of(ends, [](const std::string& end) { return is_number(end); })) return false;
  }
  return true;
}

bool is_memory(std::string_view text) {
  if (!text.empty() && std::string_view("KMGTkmgt").find(text.back()) != std::string_view::npos) text.remove_suffix(1);
  return is_number(text, 12);
}

bool has_no_controls(std::string_view text) {
  return std::ranges::none_of(text, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

/// Returns whether `text` is not empty and has no spaces and no control characters.
bool has_no_spaces(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](unsigned char c) { return c > 0x20 && c != 0x7f; });
}

bool is_nodes(std::string_view nodes) {
  const auto ends = base::split(nodes, '-');
  const auto good = [](const std::string& end) {
    return is_number(end) && std::stoi(end) >= 1 && std::stoi(end) <= kMaxNodes;
  };
  return ends.size() <= 2 && std::ranges::all_of(ends, good) && std::stoi(ends.front()) <= std::stoi(ends.back());
}

/// Returns whether it is NAME=VALUE,VALUE.
bool is_axis(std::string_view axis) {
  const std::size_t equals = axis.find('=');
  if (equals == std::string_view::npos || !is_plain_name(axis.substr(0, equals)) ||
      std::isdigit(static_cast<unsigned char>(axis[0])))
    return false;
  const auto values = base::split(axis.substr(equals + 1), ',');
  return std::ranges::none_of(values, [](const std::string& value) { return value.empty(); });
}

/// Returns the number of GPUs: 8 for "8" and for "a100:8"; 0 for other texts.
int num_gpus(std::string_view text) {
  const std::size_t colon = text.find(':');
  const std::string number(colon == std::string_view::npos ? text : text.substr(colon + 1));
  const bool good = is_number(number) && (colon == std::string_view::npos || is_plain_name(text.substr(0, colon)));
  return good && std::stoi(number) <= kMaxPerNode ? std::stoi(number) : 0;
}

void add_resource_options(OptionTable& table, SubmitOptions& submit) {
  table.group("Resources", "lockstep submit --nodes 16 --gpus-per-node 8 --time 4:00:00 -- ./train");
  table.option("--nodes,-N", submit.nodes,
               text("N", is_nodes, "an integer from 1 to " + std::to_string(kMaxNodes) + ", or MIN-MAX"),
               "number of nodes, or MIN-MAX");
  table.option("--ranks-per-node,--ntasks-per-node", submit.ranks_per_node, integer(1, kMaxPerNode),
               "ranks on each node (default: one per GPU if GPUs are requested, else as lockstep run chooses)");
  table.option("--ranks,--ntasks,-n", submit.ranks, integer(1, kMaxTotalRanks),
               "total number of ranks, in place of --ranks-per-node");
  table.exclude("--ranks", "--ranks-per-node");
  table.option("--gpus-per-node", submit.gpus_per_node,
               text(
                   "[TYPE:]N", [](std::string_view gpus) { return num_gpus(gpus) > 0; },
                   "an integer from 1 to " + std::to_string(kMaxPerNode) + ", or TYPE:N"),
               "GPUs on each node");
  table.option("--cpus-per-rank,--cpus-per-task,-c", submit.cpus_per_rank, integer(1, 1 << 16), "cores for each rank");
  table.option("--mem", submit.mem, text("N[KMGT]", is_memory, "a number with an optional suffix K, M, G or T"),
               "memory of each node, in megabytes without a suffix; 0: all");
}

void add_job_options(OptionTable& table, SubmitOptions& submit, std::vector<std::string>& grid, bool& requeue,
                     bool& no_requeue) {
  table.group("Job",
              "lockstep submit --nodes 2 --time 90 --partition gpu --array 0-15%4 -- ./train\n"
              "lockstep submit --nodes 2 --grid lr=0.1,0.01 --grid seed=1,2,3 -- ./train");
  table.option("--time,-t", submit.time,
               text(
                   "LIMIT", [](std::string_view limit) { return parse_time_limit(limit).has_value(); },
                   "minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s, as in 90, 4:00:00 or 1-12"),
               "time limit, after which SLURM ends the job: minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s");
  const auto word = [](const char* type, const char* what) {
    return text(type, has_no_spaces, std::string(what) + " without spaces");
  };
  table.option("--partition,-p", submit.partition, word("NAME", "a name"), "partition in which the job is queued");
  table.option("--account,-A", submit.account, word("NAME", "a name"), "account to which the job is charged");
  table.option("--array,-a", submit.array, text("INDICES", is_array, "indices, as in 0-15, 1,3,7, 0-15:4 or 0-15%4"),
               "submit one job for each of 0-15, 1,3,7 or 0-15:4; %4 after the indices runs at most four at once");
  table.list("--grid", grid, text("NAME=VALUE,...", is_axis, "NAME=VALUE,VALUE, as in lr=0.1,0.01"),
             "submit one job for each combination of these values, with --NAME=VALUE after the program's arguments; "
             "may be repeated");
  table.exclude("--grid", "--array");
  table.option("--name,--job-name,-J", submit.name, plain_name(), "name of the job (default: the program's name)");
  table.option("--mail", submit.mail, word("ADDRESS", "an address"),
               "send mail when the job ends, fails or is requeued");
  table.flag("--requeue", requeue, "requeue the job if it ends with exit code 75 (default)");
  table.flag("--no-requeue", no_requeue, "never requeue the job");
  table.exclude("--requeue", "--no-requeue");
  table.option("--signal-before", submit.signal_before, integer(0, kMaxSignalBefore).named("SECONDS"),
               "send SIGUSR1 to the ranks this long before the time limit, so that they save and exit (default "
               "{default}, at most a quarter of --time; 0: no signal)");
}

void add_command_options(OptionTable& table, SubmitOptions& submit) {
  table.group("How to run the program",
              "lockstep submit --nodes 2 --run=--max-restarts=3 -- python train.py\n"
              "lockstep submit --before 'source venv/bin/activate' -- python train.py");
  table.option("--remote-path", submit.remote_path, text("PATH", "the path of lockstep on the nodes"),
               "path of lockstep on the nodes (default: its path here)");
  table.list("--before", submit.before, text("COMMAND", has_no_controls, "one command on one line"),
             "a command that the script runs first, as in --before 'module load cuda'; may be repeated");
  table.list("--run", submit.run_options, text("WORD", "an option of lockstep run"),
             "pass an option to lockstep run, as in --run=--hang-timeout=600; may be repeated");
}

void add_script_options(OptionTable& table, SubmitOptions& submit) {
  // A backslash in a file name makes SLURM ignore the patterns in it.
  const auto is_directory = [](std::string_view name) {
    return has_no_controls(name) && name.find('\\') == std::string_view::npos;
  };
  table.group("Output", "lockstep submit --nodes 2 --output logs --follow -- ./train");
  table.option("--output", submit.output,
               text("DIR", is_directory, "a directory name without line breaks and backslashes"),
               "directory of the logs (default: {default}): the job's output DIR/JOB.out, the script DIR/JOB.sh, and "
               "DIR/JOB/rank.N.out and .err");
  table.flag("--dry-run", submit.dry_run, "print the script and do not submit it");
  table.flag("--follow", submit.follow,
             "print the job's output until it ends, and exit with its exit code; Ctrl-C does not stop the job");
  const std::string reason = ", but an array is several jobs";
  table.exclude("--follow", "--array", reason);
  table.exclude("--follow", "--grid", reason);
  table.footer(
      "All other options are passed on to sbatch, in the script. Attach their values, as in --qos=high; if a value is "
      "a separate word, as in --constraint gpu, write -- before the program. SBATCH_* variables do not override the "
      "script.");
}

/// Sets what depends on several options.
void set_dependent_options(const OptionTable& table, SubmitOptions& submit) {
  if (!submit.gpus_per_node.empty() && submit.ranks == 0 && submit.ranks_per_node == 0)
    submit.ranks_per_node = num_gpus(submit.gpus_per_node);
  const std::int64_t limit = parse_time_limit(submit.time).value_or(0);
  if (limit == 0) return;  // no limit
  if (!table.is_given("--signal-before"))
    submit.signal_before = static_cast<int>(std::min<std::int64_t>(submit.signal_before, limit / 4));
  if (submit.signal_before >= limit)
    throw base::UsageError("--signal-before is " + std::to_string(submit.signal_before) + ", but --time " +
                           base::quoted(submit.time, 80) + " is " + std::to_string(limit) +
                           " s; expected fewer seconds");
}

/// Returns the arguments of each task of the array: all combinations, in the order in which they are written.
std::vector<std::vector<std::string>> combine(const std::vector<std::string>& axes) {
  std::vector<std::vector<std::string>> tasks = {{}};
  for (const std::string& axis : axes) {
    const std::size_t equals = axis.find('=');
    std::vector<std::vector<std::string>> all;
    for (const auto& task : tasks) {
      for (const std::string& value : base::split(axis.substr(equals + 1), ',')) {
        all.push_back(task);
        all.back().push_back("--" + axis.substr(0, equals + 1) + value);
      }
      check_value(all.size() <= kMaxGridTasks, "--grid", axis,
                  "at most " + std::to_string(kMaxGridTasks) + " combinations");
    }
    tasks = std::move(all);
  }
  return tasks;
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
    if (!base::is_alnum_or({&c, 1}, "_-.")) c = '_';
  return is_plain_name(name) ? name : "lockstep";
}

}  // namespace

std::optional<std::int64_t> parse_time_limit(std::string_view text) {
  const std::size_t dash = text.find('-');
  const bool has_days = dash != std::string_view::npos;
  const auto fields = base::split(has_days ? text.substr(dash + 1) : text, ':');
  if (fields.size() > 3 || !std::ranges::all_of(fields, [](const std::string& field) { return is_number(field); }))
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
  SubmitOptions& submit = submission.options;
  std::vector<std::string> grid;
  bool requeue = false, no_requeue = false;
  OptionTable table(
      "lockstep submit", kSubmitUsage,
      "Writes a SLURM batch script that starts N ranks of a program with lockstep run, prints it and submits it.");
  add_resource_options(table, submit);
  add_job_options(table, submit, grid, requeue, no_requeue);
  add_command_options(table, submit);
  add_script_options(table, submit);
  SplitArguments parts = split_arguments(table, words);
  if (!table.parse_options_only(std::move(parts.own_options))) return {.options = {}, .help = table.help()};
  set_dependent_options(table, submit);
  submit.requeue = !no_requeue;
  if (!grid.empty()) {
    submit.grid = combine(grid);
    submit.array = "0-" + std::to_string(submit.grid.size() - 1);
  }
  submit.sbatch_options = std::move(parts.sbatch_options);
  for (const auto& option : submit.sbatch_options)
    for (const std::string& word : option) check_value(has_no_controls(word), "an sbatch option", word, "one line");
  if (!submit.run_options.empty()) check_options_for_run(submit);
  submit.command = std::move(parts.command);
  if (submit.command.empty() || submit.command.front().empty())
    throw table.error(std::string("no program given; expected ") + kSubmitUsage);
  if (submit.name.empty()) submit.name = job_name_for(submit.command.front());
  return submission;
}

}  // namespace lockstep::launcher::cli
