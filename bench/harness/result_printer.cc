#include "bench/harness/result_printer.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace lockstep::bench {
namespace {

using nlohmann::ordered_json;

/// Returns the first "model name" in /proc/cpuinfo.
std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "unknown";
}

std::string load_now() {
  std::string text;
  std::ifstream("/proc/loadavg") >> text;
  return text;
}

ordered_json machine() {
  utsname kernel{};
  ::uname(&kernel);
  return {{"what", "machine"},
          {"cpu", cpu_model()},
          {"cores", ::sysconf(_SC_NPROCESSORS_ONLN)},
          {"memory_bytes",
           static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))},
          {"kernel", kernel.release},
          {"libtorch", LOCKSTEP_BENCH_LIBTORCH},
          {"compiler", LOCKSTEP_BENCH_COMPILER},
          {"lockstep", LOCKSTEP_VERSION},
          {"load_before", load_now()}};
}

void print_json(const ordered_json& line) {
  std::puts(line.dump().c_str());
  std::fflush(stdout);
}

std::string title(const ComparisonResult& comparison) {
  std::string text = comparison.what;
  if (comparison.bytes > 0) text += " of " + size_text(comparison.bytes);
  if (!comparison.model.empty()) text += " of " + comparison.model;
  if (comparison.parameters > 0) text += " (" + std::to_string(comparison.parameters) + " parameters)";
  if (!comparison.optimizer.empty()) text += ", " + comparison.optimizer;
  return text + ", " + std::to_string(comparison.ranks) + (comparison.ranks == 1 ? " rank" : " ranks");
}

}  // namespace

ResultPrinter::ResultPrinter(bool json) : json_(json) {
  const ordered_json line = machine();
  if (json_) print_json(line);
  std::fprintf(json_ ? stderr : stdout, "%s, %ld cores, libtorch %s, load %s\n", cpu_model().c_str(),
               ::sysconf(_SC_NPROCESSORS_ONLN), LOCKSTEP_BENCH_LIBTORCH, load_now().c_str());
}

void ResultPrinter::add(const ComparisonResult& comparison) {
  std::FILE* out = json_ ? stderr : stdout;
  std::fprintf(out, "\n%s", title(comparison).c_str());
  if (comparison.bandwidth > 0) std::fprintf(out, "; memory %.0f GB/s", comparison.bandwidth / 1e9);
  std::fprintf(out, "\n  %-26s %10s %10s %7s %7s\n", "", "median", "min", "spread", "ratio");
  for (const ComparisonRow& row : comparison.rows) {
    std::fprintf(out, "  %-26s %10s %10s %6.1f%% %7.3f%s\n", row.impl.c_str(), time_text(row.seconds.median_s).c_str(),
                 time_text(row.seconds.min_s).c_str(), 100 * row.seconds.spread, row.ratio,
                 row.is_noisy ? "  noisy" : "");
    if (!json_) continue;
    ordered_json line{{"what", comparison.what}, {"impl", row.impl}, {"ranks", comparison.ranks}, {"hosts", 1}};
    if (comparison.bytes > 0) line["bytes"] = comparison.bytes;
    if (!comparison.model.empty()) line["model"] = comparison.model;
    if (comparison.parameters > 0) line["parameters"] = comparison.parameters;
    if (!comparison.optimizer.empty()) line["optimizer"] = comparison.optimizer;
    line.update({{"median_s", row.seconds.median_s},
                 {"min_s", row.seconds.min_s},
                 {"runs", row.seconds.runs},
                 {"spread", row.seconds.spread},
                 {"ratio", row.ratio},
                 {"ratio_to", comparison.rows.front().impl}});
    if (row.ratio_to_memcpy) line["ratio_to_memcpy"] = *row.ratio_to_memcpy;
    if (comparison.bandwidth > 0) line["bandwidth"] = comparison.bandwidth;
    line["noisy"] = row.is_noisy;
    print_json(line);
  }
  std::fflush(out);
}

void ResultPrinter::add_bytes(const std::string& what, int ranks, const std::string& model,
                              const std::string& optimizer, const std::vector<std::pair<std::string, double>>& values) {
  std::FILE* out = json_ ? stderr : stdout;
  std::fprintf(out, "\n%s, %s, %s, %d %s\n", what.c_str(), model.c_str(), optimizer.c_str(), ranks,
               ranks == 1 ? "rank" : "ranks");
  for (const auto& [impl, bytes] : values) {
    std::fprintf(out, "  %-34s %8.1f MiB %7.3f\n", impl.c_str(), bytes / (1 << 20), bytes / values.front().second);
    if (json_)
      print_json({{"what", what},
                  {"impl", impl},
                  {"ranks", ranks},
                  {"hosts", 1},
                  {"model", model},
                  {"optimizer", optimizer},
                  {"bytes_used", static_cast<std::uint64_t>(bytes)},
                  {"ratio", bytes / values.front().second},
                  {"ratio_to", values.front().first}});
  }
  std::fflush(out);
}

void ResultPrinter::report_missing(const std::string& baseline, const std::string& reason) {
  std::fprintf(stderr, "not measured: %s; %s\n", baseline.c_str(), reason.c_str());
}

}  // namespace lockstep::bench
