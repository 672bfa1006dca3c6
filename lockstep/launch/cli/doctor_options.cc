#include "lockstep/launch/cli/doctor_options.h"

#include "lockstep/launch/cli/option_table.h"

namespace lockstep::launcher::cli {
namespace {

constexpr const char* kDoctorUsage = "lockstep doctor [options] [--] [program [arguments...]]";

struct Unit {
  char suffix;
  std::int64_t bytes;
};
constexpr Unit kUnits[] = {{'G', 1'000'000'000}, {'M', 1'000'000}, {'K', 1'000}};  // as is usual for network traffic

/// A number of bytes such as "250M".
OptionType<std::uint64_t> bytes() {
  const auto parse = [](const std::string& what, const std::string& text) {
    constexpr std::int64_t kMaxBytes = std::int64_t{1} << 50;
    std::string digits = text;
    std::int64_t unit = 1;
    for (const Unit& one : kUnits)
      if (!text.empty() && text.back() == one.suffix) unit = one.bytes;
    if (unit > 1) digits.pop_back();
    const auto number = base::parse_int(digits);
    check_value(number && *number >= 1 && *number <= kMaxBytes / unit, what, text,
                "1 or more bytes, or a number with the suffix K, M or G: 250M is 250,000,000");
    return static_cast<std::uint64_t>(*number * unit);
  };
  const auto print = [](std::uint64_t value) {
    for (const Unit& one : kUnits) {
      const auto unit = static_cast<std::uint64_t>(one.bytes);
      if (value % unit == 0) return std::to_string(value / unit) + one.suffix;
    }
    return std::to_string(value);
  };
  return {"N", parse, print};
}

}  // namespace

DoctorOptions parse_doctor_options(std::vector<std::string> words, std::string& help) {
  DoctorOptions options;
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
  table.footer("The exit code is 0 if there is no problem and 1 if there is one; 64 means that no host was checked.");
  auto command = table.parse(std::move(words));
  if (!command) {
    help = table.help();
    return options;
  }
  options.command = std::move(*command);
  if (!options.command.empty() && options.command.front().empty())
    throw table.error(std::string("the program is \"\"; expected ") + kDoctorUsage);
  return options;
}

}  // namespace lockstep::launcher::cli
