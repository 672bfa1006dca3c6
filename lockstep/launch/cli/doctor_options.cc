#include "lockstep/launch/cli/doctor_options.h"

#include <CLI/CLI.hpp>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/cli/option_parsing.h"

namespace lockstep::launcher {
namespace {

class DoctorFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "usage: lockstep doctor [options] [--] [program [arguments...]]\n";
  }
};

/// "250M": decimal multiples, as networks count.
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
                           "; allowed are bytes, 1 or more, or with K, M or G behind: 250M is 250,000,000");
  return static_cast<std::uint64_t>(*number * unit);
}

}  // namespace

DoctorOptions parse_doctor_options(std::vector<std::string> words, std::string& help) {
  DoctorOptions options;
  RawHostOptions raw;
  std::string model_bytes;
  CLI::App app(
      "Looks at each host for what would keep a program from running there, and says what to do. Nothing is started or "
      "changed.");
  app.set_help_flag("-h,--help", "show this text");
  app.formatter(std::make_shared<DoctorFormatter>());
  declare_host_options(app, raw);
  app.add_flag("--mpi", options.mpi, "look for what mpirun needs on each host, as well");
  declare_option(
      app, "--model-bytes", model_bytes, "N",
      "bytes of gradients that a step sends, for what the network costs; K, M and G are decimal (default 250M)");
  app.add_flag("--json", options.json, "one object with all findings");
  app.footer("The exit code is 0 when nothing is bad, 1 when something is; 64 means that nobody was asked.");
  auto command = parse_options(app, "doctor", std::move(words));
  if (!command) {
    help = app.help();
    return options;
  }
  check_host_options(app, "doctor", raw, options);
  if (is_given(app, "--model-bytes")) options.model_bytes = parse_bytes("--model-bytes", model_bytes);
  options.command = std::move(*command);
  if (!options.command.empty() && options.command.front().empty())
    throw base::UsageError(
        "lockstep doctor: the program is \"\"; allowed is: lockstep doctor [options] [--] [program [arguments...]]");
  return options;
}

}  // namespace lockstep::launcher
