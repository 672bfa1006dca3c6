#include "lockstep/launch/cli/doctor_options.h"

#include <CLI/CLI.hpp>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/help_layout.h"
#include "lockstep/launch/cli/option_parsing.h"

namespace lockstep::launcher::cli {
namespace {

const char* const kDoctorUsage = "lockstep doctor [options] [--] [program [arguments...]]";
constexpr const char* kCheckGroup = "What to check";
constexpr const char* kReportGroup = "Output";

/// Parses a number of bytes such as "250M". The suffixes are decimal, as is usual for network traffic.
std::uint64_t parse_bytes(const char* what, const std::string& text) {
  constexpr std::int64_t kMaxBytes = std::int64_t{1} << 50;
  std::string digits = text;
  std::int64_t unit = 1;
  for (const auto& [suffix, size] : {std::pair{'K', 1'000}, std::pair{'M', 1'000'000}, std::pair{'G', 1'000'000'000}})
    if (!digits.empty() && digits.back() == suffix) unit = size;
  if (unit > 1) digits.pop_back();
  const auto number = base::parse_int(digits);
  if (!number || *number < 1 || *number > kMaxBytes / unit)
    throw base::UsageError(std::string(what) + " is " + base::quoted(text, 80) +
                           "; expected 1 or more bytes, or a number with the suffix K, M or G: 250M is 250,000,000");
  return static_cast<std::uint64_t>(*number * unit);
}

void declare_doctor_options(CLI::App& app, RawHostOptions& raw, std::string& model_bytes, DoctorOptions& options) {
  begin_option_group(app, kCheckGroup);
  app.set_help_flag("-h,--help", "show this text");
  app.add_flag("--mpi", options.mpi, "also check what mpirun needs on each host");
  declare_option(app, "--model-bytes", model_bytes, "N",
                 "gradient bytes that one step sends, to estimate the network cost; K, M and G are decimal (default "
                 "250M)");
  declare_host_options(app, raw);
  begin_option_group(app, kReportGroup);
  app.add_flag("--json", options.json, "print one JSON object with all findings");
  app.footer("The exit code is 0 if there is no problem and 1 if there is one; 64 means that no host was checked.");
  set_help_layout(app, {.usage = kDoctorUsage,
                        .examples = {
                            {kCheckGroup, "lockstep doctor --model-bytes 14G ./train"},
                            {kHostGroup, "lockstep doctor -H alpha:4,beta:4 ./train"},
                            {kReportGroup, "lockstep doctor --hostfile hosts --json ./train"},
                        }});
}

}  // namespace

DoctorOptions parse_doctor_options(std::vector<std::string> words, std::string& help) {
  DoctorOptions options;
  RawHostOptions raw;
  std::string model_bytes;
  CLI::App app(
      "Checks each host for problems that would keep a program from running there, and prints a remedy for each. "
      "Starts "
      "and changes nothing.");
  declare_doctor_options(app, raw, model_bytes, options);
  auto command = parse_options(app, "doctor", std::move(words));
  if (!command) {
    help = app.help();
    return options;
  }
  check_host_options(app, "doctor", raw, options);
  if (is_given(app, "--model-bytes")) options.model_bytes = parse_bytes("--model-bytes", model_bytes);
  options.command = std::move(*command);
  if (!options.command.empty() && options.command.front().empty())
    throw base::UsageError(std::string("lockstep doctor: the program is \"\"; expected ") + kDoctorUsage);
  return options;
}

}  // namespace lockstep::launcher::cli
