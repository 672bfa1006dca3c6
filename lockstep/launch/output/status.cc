#include "lockstep/launch/output/status.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>

#include "lockstep/base/net/socket.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/job/health/progress_report.h"
#include "lockstep/launch/process/activity.h"
#include "lockstep/launch/protocol/status_socket.h"

namespace lockstep::launcher::output {
namespace {

using base::telemetry::RankSnapshot;
using protocol::JobStatus;
using protocol::RankState;
using protocol::RankStatus;
using namespace std::chrono_literals;

constexpr auto kCpuInterval = 500ms;  // the kernel counts CPU time in steps of 10 ms: 2 percent of this
constexpr const char* kNoInit = "no init() yet";

std::string mib(std::uint64_t bytes) { return std::to_string((bytes + (1 << 19)) >> 20) + " MiB"; }

std::string current_operation(const RankSnapshot& rank) {
  const auto* now = job::health::current_operation(rank);
  return now ? job::health::describe(*now) : "";
}

/// Returns the state as JSON has it.
std::string state_name(RankState state) {
  switch (state) {
    case RankState::kRunning: return "running";
    case RankState::kStopped: return "stopped";
    case RankState::kExited: return "exited";
    case RankState::kUnknown: return "unknown";
  }
  return "";
}

bool is_running(const RankStatus& rank) {
  return rank.state == RankState::kRunning || rank.state == RankState::kStopped;
}

/// Returns the state as the table has it.
std::string state_text(const RankStatus& rank) {
  if (rank.state == RankState::kUnknown) return "unknown: its host has not replied";
  const std::string name = state_name(rank.state);
  if (!is_running(rank)) return name;
  if (!rank.page) return name + ", " + kNoInit;
  return rank.page->has_left ? name + ", has left its world" : name;
}

std::string json_line(const JobStatus& job, const RankStatus& rank) {
  using Json = nlohmann::ordered_json;
  Json line = {{"job", job.label.id},
               {"name", job.label.name},
               {"launcher_host", job.label.launcher_host},
               {"launcher_pid", job.label.launcher_pid},
               {"rank", rank.rank},
               {"world_size", job.label.world_size},
               {"host", rank.host},
               {"pid", rank.pid},
               {"state", state_name(rank.state)},
               {"cpu_percent", rank.cpu_percent ? Json(*rank.cpu_percent) : Json()},
               {"resident_bytes", is_running(rank) ? Json(rank.resident_bytes) : Json()},
               {"initialized", rank.page.has_value()}};
  if (rank.page) {
    const RankSnapshot& page = *rank.page;
    line.update(Json{{"transport", page.transport},
                     {"step", page.steps},
                     {"batches", page.batches},
                     {"exchanges", page.gradient_reductions},
                     {"waiting", page.waiting},
                     {"busy_with", page.busy_with},
                     {"output_blocked", page.output_blocked},
                     {"operation", current_operation(page)},
                     {"arena",
                      {{"live_bytes", page.live_bytes},
                       {"peak_live_bytes", page.peak_live_bytes},
                       {"high_water_bytes", page.high_water_bytes},
                       {"resident_bytes", page.resident_bytes}}}});
  }
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

/// Returns `text` with spaces up to `width`: before it, or after it with `left`.
std::string padded(const std::string& text, std::size_t width, bool left = false) {
  const std::string spaces(width - std::min(width, text.size()), ' ');
  return left ? text + spaces : spaces + text;
}

/// Returns a line of the table. `host_width` is 0 if there is no column of hosts.
std::string table_line(const RankStatus& rank, std::size_t host_width) {
  const auto when_running = [&](const std::string& text) { return is_running(rank) ? text : "-"; };
  const auto from_page = [&](auto value) { return rank.page ? value(*rank.page) : std::string("-"); };
  std::string line = padded(std::to_string(rank.rank), 5) + "  ";
  if (host_width > 0) line += padded(rank.host, host_width, true) + "  ";
  line += padded(when_running(std::to_string(rank.pid)), 7);
  line += padded(rank.cpu_percent ? std::to_string(*rank.cpu_percent) + "%" : "-", 7);
  line += padded(when_running(mib(rank.resident_bytes)), 12) + "  ";
  line += padded(from_page([](const RankSnapshot& page) { return page.transport; }), 9, true);
  line += padded(from_page([](const RankSnapshot& page) { return std::to_string(page.gradient_reductions); }), 12);
  line += padded(from_page([](const RankSnapshot& page) { return mib(page.live_bytes); }), 12);
  line += padded(from_page([](const RankSnapshot& page) { return mib(page.peak_live_bytes); }), 12);
  line += padded(from_page([](const RankSnapshot& page) { return mib(page.resident_bytes); }), 12);
  return line + "  " + state_text(rank) + "\n";
}

/// Returns "job train (lockstep run with pid 4711 on alpha): 4 of 4 ranks on 2 hosts".
std::string heading(const JobStatus& job, std::size_t num_hosts, const std::string& host) {
  const plan::JobLabel& label = job.label;
  std::string text = "job " + (label.name.empty() ? label.id : label.name);
  if (label.launcher_pid > 0)
    text += " (lockstep run with pid " + std::to_string(label.launcher_pid) +
            (label.launcher_host == host ? "" : " on " + label.launcher_host) + ")";
  text += ": " + std::to_string(job.ranks.size()) + " of " + std::to_string(label.world_size) +
          (label.world_size == 1 ? " rank" : " ranks");
  if (num_hosts > 1) return text + " on " + std::to_string(num_hosts) + " hosts";
  return job.is_whole ? text : text + " on this host";
}

/// Returns the table of one job and a report about the operations of its ranks.
std::string job_text(const JobStatus& job, const std::string& host) {
  std::set<std::string> hosts;
  std::size_t host_width = std::string_view("host").size();
  std::vector<RankSnapshot> pages;
  bool has_no_init = false;
  for (const RankStatus& rank : job.ranks) {
    hosts.insert(rank.host);
    host_width = std::max(host_width, rank.host.size());
    if (is_running(rank) && rank.page) pages.push_back(*rank.page);
    has_no_init |= is_running(rank) && !rank.page;
  }
  if (hosts.size() < 2) host_width = 0;
  std::string text = heading(job, hosts.size(), host) + "\n rank  ";
  if (host_width > 0) text += padded("host", host_width, true) + "  ";
  text += "    pid    cpu         rss  transport  reductions       arena        peak    resident  state\n";
  for (const RankStatus& rank : job.ranks) text += table_line(rank, host_width);
  if (has_no_init) text += std::string("  ") + kNoInit + ": not a Lockstep program, or one that is still starting\n";
  return text + job::health::progress_report(pages);
}

/// Measures the resource use of those ranks of this host that no agent has reported.
void add_resource_use(std::vector<JobStatus>& jobs, const std::string& host) {
  std::vector<std::pair<RankStatus*, process::ProcessSample>> begun;
  for (JobStatus& job : jobs)
    for (RankStatus& rank : job.ranks)
      if (is_running(rank) && rank.host == host && rank.resident_bytes == 0)
        begun.emplace_back(&rank, process::sample_process(static_cast<pid_t>(rank.pid)));
  if (begun.empty()) return;
  std::this_thread::sleep_for(kCpuInterval);
  for (const auto& [rank, before] : begun) {
    const process::ProcessSample now = process::sample_process(before.pid);
    rank->state = now.state == 'T' || now.state == 't' ? RankState::kStopped : RankState::kRunning;
    rank->cpu_percent = cpu_percent(before, now);
    rank->resident_bytes = now.resident_bytes;
  }
}

}  // namespace

std::vector<JobStatus> combine_reports(std::vector<JobStatus> reports, const std::vector<RankSnapshot>& pages,
                                       const std::string& host) {
  std::ranges::stable_partition(reports, &JobStatus::is_whole);
  for (const RankSnapshot& page : pages)
    reports.push_back(
        {.label = {.id = page.job, .name = {}, .launcher_host = {}, .world_size = page.world_size},
         .ranks = {{.rank = page.rank, .host = host, .state = RankState::kRunning, .pid = page.pid, .page = page}}});
  std::map<std::string, JobStatus> jobs;
  for (JobStatus& report : reports) {
    const auto [entry, is_first] = jobs.try_emplace(report.label.id, report);
    if (is_first) continue;
    std::vector<RankStatus>& ranks = entry->second.ranks;
    // Jobs that `lockstep run` has not started may have the same ID, such as "0" without a launcher.
    const bool is_unique = !entry->second.label.launcher_host.empty();
    for (RankStatus& rank : report.ranks) {
      const auto same = std::ranges::find_if(
          ranks, [&](const auto& known) { return known.rank == rank.rank && (is_unique || known.pid == rank.pid); });
      if (same == ranks.end())
        ranks.push_back(std::move(rank));
      else if (same->state == RankState::kUnknown)
        *same = std::move(rank);
    }
  }
  std::vector<JobStatus> sorted;
  for (auto& [id, job] : jobs) {
    std::ranges::sort(job.ranks, [](const RankStatus& a, const RankStatus& b) {
      return std::tie(a.rank, a.pid) < std::tie(b.rank, b.pid);
    });
    sorted.push_back(std::move(job));
  }
  return sorted;
}

std::string status_text(const std::vector<JobStatus>& jobs, const std::string& host, bool json) {
  std::string text;
  for (const JobStatus& job : jobs) {
    if (!json) text += (text.empty() ? "" : "\n") + job_text(job, host);
    for (const RankStatus& rank : job.ranks)
      if (json) text += json_line(job, rank);
  }
  return text.empty() && !json ? "no ranks of this user on this host\n" : text;
}

void print_status(bool json) {
  const std::string host = base::net::host_name();
  protocol::StatusReplies replies = protocol::request_job_status(base::Deadline::in(base::kStatusTimeout));
  std::vector<JobStatus> jobs = combine_reports(std::move(replies.jobs), base::telemetry::find_rank_pages(), host);
  add_resource_use(jobs, host);
  std::fputs(status_text(jobs, host, json).c_str(), stdout);
  for (const pid_t pid : replies.silent)
    std::fprintf(stderr, "lockstep status: the lockstep process %d has not replied\n", static_cast<int>(pid));
}

}  // namespace lockstep::launcher::output
