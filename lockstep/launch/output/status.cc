#include "lockstep/launch/output/status.h"

#include <dirent.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>

#include "lockstep/base/parse.h"
#include "lockstep/job/health/progress_report.h"

namespace lockstep::launcher::output {
namespace {

std::string mib(std::uint64_t bytes) { return std::to_string((bytes + (1 << 19)) >> 20) + " MiB"; }

std::string current_operation(const base::telemetry::RankSnapshot& rank) {
  const auto* now = job::health::current_operation(rank);
  return now ? job::health::describe(*now) : "";
}

std::string json_line(const base::telemetry::RankSnapshot& rank) {
  const nlohmann::ordered_json line = {{"job", rank.job},
                                       {"rank", rank.rank},
                                       {"world_size", rank.world_size},
                                       {"pid", rank.pid},
                                       {"transport", rank.transport},
                                       {"step", rank.steps},
                                       {"batches", rank.batches},
                                       {"exchanges", rank.gradient_reductions},
                                       {"waiting", rank.waiting},
                                       {"busy_with", rank.busy_with},
                                       {"output_blocked", rank.output_blocked},
                                       {"operation", current_operation(rank)},
                                       {"arena",
                                        {{"live_bytes", rank.live_bytes},
                                         {"peak_live_bytes", rank.peak_live_bytes},
                                         {"high_water_bytes", rank.high_water_bytes},
                                         {"resident_bytes", rank.resident_bytes}}}};
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string table_line(const base::telemetry::RankSnapshot& rank) {
  char line[200];
  std::snprintf(line, sizeof line, "%5d  %7d  %-9s  %10llu  %10s  %10s  %10s\n", rank.rank, static_cast<int>(rank.pid),
                rank.transport.c_str(), static_cast<unsigned long long>(rank.gradient_reductions),
                mib(rank.live_bytes).c_str(), mib(rank.peak_live_bytes).c_str(), mib(rank.resident_bytes).c_str());
  return line;
}

/// Returns the table of one job and a report about the operations of its ranks.
std::string job_text(const std::vector<base::telemetry::RankSnapshot>& ranks) {
  const base::telemetry::RankSnapshot& first = ranks.front();
  std::string text = "job " + first.job + ": " + std::to_string(ranks.size()) + " of " +
                     std::to_string(first.world_size) + (first.world_size == 1 ? " rank" : " ranks") +
                     " on this host\n rank      pid  transport  reductions       arena        peak    resident\n";
  for (const base::telemetry::RankSnapshot& rank : ranks) text += table_line(rank);
  return text + job::health::progress_report(ranks);
}

}  // namespace

std::vector<base::telemetry::RankSnapshot> find_local_ranks() {
  std::vector<base::telemetry::RankSnapshot> ranks;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir("/proc"), ::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    const auto pid = base::parse_int(entry->d_name);
    if (!pid) continue;
    if (auto snapshot = base::telemetry::find_rank_page(static_cast<pid_t>(*pid)))
      ranks.push_back(std::move(*snapshot));
  }
  std::sort(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
    return std::tie(a.job, a.rank, a.pid) < std::tie(b.job, b.rank, b.pid);
  });
  return ranks;
}

std::string status_text(const std::vector<base::telemetry::RankSnapshot>& ranks, bool json) {
  std::string text;
  if (json) {
    for (const base::telemetry::RankSnapshot& rank : ranks) text += json_line(rank);
    return text;
  }
  if (ranks.empty()) return "no ranks of this user on this host\n";
  for (auto begin = ranks.begin(); begin != ranks.end();) {
    const auto end = std::find_if(begin, ranks.end(), [&](const auto& rank) { return rank.job != begin->job; });
    text += (text.empty() ? "" : "\n") + job_text({begin, end});
    begin = end;
  }
  return text;
}

}  // namespace lockstep::launcher::output
