#include "lockstep/launch/slurm/batch_script.h"

#include <algorithm>
#include <cstdio>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::launcher::slurm {
namespace {

constexpr std::size_t kMaxCommentColumn = 44;  // longer directives do not move the comments of the others

/// One #SBATCH line.
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
    std::string line = "#SBATCH";
    for (const std::string& word : directive.words) line += " " + sbatch_quote(word);
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
  text += " -- \\\n ";
  for (const std::string& word : submit.command) text += " " + shell_quote(word);
  return text + (submit.grid.empty() ? "" : " \"${grid[@]}\"");
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
  for (std::size_t i = 0; i < submit.grid.size(); ++i) {
    text += "  " + std::to_string(i) + ") grid=(";
    for (const std::string& word : submit.grid[i]) text += (text.back() == '(' ? "" : " ") + shell_quote(word);
    text += ") ;;\n";
  }
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
  const bool escapes = std::any_of(word.begin(), word.end(), is_control);
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
  if (!word.empty() && std::all_of(word.begin(), word.end(), is_plain)) return std::string(word);
  std::string text = "\"";
  for (const char c : word) text += (c == '"' || c == '\\' ? "\\" : "") + std::string(1, c);
  return text + "\"";
}

}  // namespace lockstep::launcher::slurm
