#include "lockstep/launch/agent/rank_monitor.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"
#include "lockstep/launch/process/stack_dump.h"
#include "lockstep/launch/protocol/status_socket.h"

namespace lockstep::launcher::agent {
namespace {

/// A rank that has reported no progress for this long is measured, unless it waits for another rank.
constexpr std::chrono::seconds kUnreportedTime(2);

bool has_running_operation(const base::telemetry::RankPage& page) {
  const auto operations = base::telemetry::read_flight_ring(page.flight);
  return std::ranges::any_of(operations, &base::telemetry::OperationRecord::is_running);
}

}  // namespace

std::int64_t parse_oom_kills(std::string_view text) {
  constexpr std::string_view kName = "oom_kill ";
  for (const std::string& line : base::split(text, '\n'))
    if (line.rfind(kName, 0) == 0) return base::parse_int(std::string_view(line).substr(kName.size())).value_or(0);
  return 0;
}

std::int64_t count_oom_kills() {
  // Lines of /proc/self/cgroup: "4:memory:/path" (v1), "0::/path" (v2).
  for (const std::string& line : base::split(process::read_file("/proc/self/cgroup"), '\n')) {
    const std::size_t path = line.find(":/");
    if (path == std::string::npos) continue;
    const std::string folder = line.substr(path + 1);
    std::string text;
    if (line.find(":memory:") != std::string::npos)
      text = process::read_file("/sys/fs/cgroup/memory" + folder + "/memory.oom_control");
    else if (line.rfind("0::", 0) == 0)
      text = process::read_file("/sys/fs/cgroup" + folder + "/memory.events");
    if (text.find("oom_kill ") != std::string::npos) return parse_oom_kills(text);
  }
  return parse_oom_kills(process::read_file("/proc/vmstat"));
}

RankMonitor::RankMonitor(int rank, const job::JobKey& key) : rank_(rank), memory_(base::telemetry::create_rank_page()) {
  base::telemetry::RankPage& page = this->page();
  page.agent_pid = ::getpid();
  std::memcpy(page.key.data(), key.bytes().data(), page.key.size());
}

std::array<std::int64_t, 64> RankMonitor::tcp_ports() const {
  std::array<std::int64_t, 64> ports{};
  std::ranges::copy(page().tcp_ports, ports.begin());
  return ports;
}

std::optional<base::telemetry::RankSnapshot> RankMonitor::snapshot() const {
  auto snapshot = base::telemetry::read_rank_page(page());
  if (snapshot) snapshot->waiting |= health_.is_waiting;
  return snapshot;
}

job::health::RankHealth RankMonitor::health(pid_t pid, job::health::StallTimer::Clock::time_point now) {
  const base::telemetry::RankPage& page = this->page();
  const pid_t page_pid = this->pid(pid);
  earlier_sample_ = std::exchange(last_sample_, process::sample_process(page_pid));
  using job::health::RankPhase;
  job::health::RankHealth result{.rank = rank_,
                                 .phase = is_in_world()         ? RankPhase::kInWorld
                                          : page.is_published() ? RankPhase::kAfterWorld
                                                                : RankPhase::kBeforeWorld,
                                 .process_state = last_sample_.state};
  // The page has the pid of a child of the rank's process, and the child has exited without leaving its world.
  if (page_pid != pid && (result.process_state == '?' || result.process_state == 'Z'))
    result.phase = RankPhase::kAfterWorld;
  const bool held = result.process_state == 't' || process::is_dumping_core(page_pid);
  ++polls_;
  // A count that grows with every sample never stalls.
  const bool in_world = result.phase == RankPhase::kInWorld;
  beat_timer_.sample(in_world && !held ? page.heartbeats.load() : result.process_state == 'T' ? 0 : polls_, now);
  const auto phase = static_cast<std::uint64_t>(result.phase);  // to join or leave the world is progress
  progress_timer_.sample(held ? polls_ : phase + page.progress() + (in_world ? 0 : num_work_samples_), now);
  report_timer_.sample(held ? polls_ : phase + page.reported_progress(), now);
  result.since_heartbeat = beat_timer_.stalled_for(now);
  result.since_progress = progress_timer_.stalled_for(now);
  result.since_report = report_timer_.stalled_for(now);
  // A thread that waits for requests, for example, does not keep the main thread from working. torch's
  // DistributedDataParallel waits for a future, of which nothing is seen but the operation.
  result.is_waiting =
      page.main_waiting != 0 ||
      (page.works == 0 &&
       (page.waiting != 0 || (in_world && result.since_report >= kUnreportedTime && has_running_operation(page))));
  result.steps = page.step();
  result.looks = static_cast<std::int64_t>(page.looks);
  result.pending_looks = static_cast<std::int64_t>(page.pending_looks);
  health_ = result;
  if (!needs_activity()) {
    needed_activity_ = false;
    this->page().works.store(0);
  }
  return result;
}

bool RankMonitor::needs_activity() const { return page().main_waiting == 0 && health_.since_report >= kUnreportedTime; }

void RankMonitor::add_activity(pid_t pid, const process::HostActivity& activity,
                               job::health::StallTimer::Clock::time_point now, job::health::RankHealth& health) {
  process::Usage usage = process::usage_of_tree(pid, activity);
  usage.bytes -= std::min(usage.bytes, page().store_bytes.load());
  const auto elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(now - usage_time_);
  if (elapsed <= base::kMaxSampleGap) {  // else this is the first sample
    // What it did before it stopped reporting is not work that goes on.
    const bool works = needed_activity_ && process::has_worked(usage_, usage, elapsed);
    page().works.store(works ? 1 : 0);
    if (works) ++num_work_samples_;
    if (usage.cpu_time - usage_.cpu_time >= process::kActiveCpuTime) ++num_active_samples_;
  }
  needed_activity_ = needs_activity();
  usage_ = usage;
  usage_time_ = now;
  activity_timer_.sample(num_active_samples_, now);
  health.since_activity = activity_timer_.stalled_for(now);
}

protocol::RankStatus RankMonitor::status(pid_t pid) const {
  protocol::RankStatus status{.rank = rank_, .host = {}, .state = protocol::RankState::kExited, .page = snapshot()};
  if (status.page) status.page->rank = rank_;
  if (pid <= 0) return status;
  process::ProcessSample now = process::sample_process(this->pid(pid));
  if (now.state == '?' || now.state == 'Z') now = process::sample_process(pid);  // see health()
  status.state = now.state == 'T' || now.state == 't' ? protocol::RankState::kStopped : protocol::RankState::kRunning;
  status.pid = now.pid;
  status.resident_bytes = now.resident_bytes;
  status.cpu_percent = cpu_percent(earlier_sample_.pid == now.pid ? earlier_sample_ : last_sample_, now);
  return status;
}

StatusResponder::StatusResponder(plan::JobLabel label) : label_(std::move(label)), host_(base::net::host_name()) {
  try {
    listener_.emplace(protocol::kStatusSocketPrefix);
  } catch (const base::SystemError&) {
    // See fd().
  }
}

void StatusResponder::reply(std::vector<protocol::RankStatus> ranks) const {
  for (protocol::RankStatus& rank : ranks) rank.host = host_;
  const protocol::JobStatus job{.label = label_, .is_whole = false, .ranks = std::move(ranks)};
  while (const base::Fd connection = listener_->try_accept()) protocol::send_job_status(connection.get(), job);
}

}  // namespace lockstep::launcher::agent
