#include "lockstep/base/telemetry/rank_page.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <tuple>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/monotonic.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/proc_stat.h"

namespace lockstep::base::telemetry {
namespace {

constexpr const char* kMemfdName = "lockstep-rank";
constexpr std::string_view kMemfdLink = "/memfd:lockstep-rank (deleted)";

std::string read_link(const std::string& path) {
  char text[64];
  const ssize_t size = ::readlink(path.c_str(), text, sizeof text);
  return size < 0 ? "" : std::string(text, static_cast<std::size_t>(size));
}

/// Returns a - b modulo 2^64: values from an untrusted page may overflow.
std::int64_t wrapping_difference(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b));
}

/// Converts the ticks in `snapshot`, which was read just now, to nanoseconds. Assumes that the counter has run at a
/// constant rate since the page was published. Replaces times in the future by the present.
void to_nanoseconds(const RankPage& page, RankSnapshot& snapshot) {
  const std::int64_t elapsed_ticks = wrapping_difference(ticks(), page.published_ticks);
  const double rate = elapsed_ticks > 0
                          ? static_cast<double>(wrapping_difference(snapshot.read_at_ns, page.published_ns)) /
                                static_cast<double>(elapsed_ticks)
                          : 1;
  const auto convert = [&](std::int64_t time) {
    const double ago = static_cast<double>(wrapping_difference(snapshot.read_at_ns, page.published_ns)) -
                       static_cast<double>(wrapping_difference(time, page.published_ticks)) * rate;
    return snapshot.read_at_ns -
           static_cast<std::int64_t>(std::clamp(ago, 0.0, static_cast<double>(snapshot.read_at_ns - 1)));
  };
  for (OperationRecord& operation : snapshot.operations) {
    operation.started = convert(operation.started);
    if (operation.is_finished()) operation.ended = convert(operation.ended);
  }
}

}  // namespace

std::optional<RankSnapshot> read_rank_page(const RankPage& page) {
  if (!page.is_published()) return std::nullopt;
  RankSnapshot snapshot{.pid = page.pid,
                        .rank = page.rank,
                        .world_size = page.world_size,
                        .job = text_of(page.job),
                        .transport = text_of(page.transport),
                        .steps = page.step(),
                        .batches = page.batches,
                        .gradient_reductions = page.gradient_reductions,
                        .waiting = page.waiting != 0,
                        .has_left = page.has_left != 0,
                        .output_blocked = page.output_blocked != 0,
                        .busy_with = page.busy_depth > 0 ? text_of(page.busy_with.load().text) : "",
                        .handles = bytes_of(page.handles.load().text),
                        .live_bytes = page.arena.live,
                        .peak_live_bytes = page.arena.peak_live,
                        .high_water_bytes = page.arena.high_water,
                        .resident_bytes = page.arena.resident,
                        .operations = read_flight_ring(page.flight)};
  snapshot.read_at_ns = monotonic_ns();
  to_nanoseconds(page, snapshot);
  return snapshot;
}

SharedMemory create_rank_page() { return SharedMemory::create(kMemfdName, sizeof(RankPage)); }

// Zeroed memory is the initial state. A constructor would touch every page of the memory, so none runs.
RankPage& rank_page_in(const SharedMemory& memory) { return *std::launder(reinterpret_cast<RankPage*>(memory.data())); }

namespace {

constexpr int kMaxAncestors = 8;  // maximum number of programs between the agent and a rank

pid_t parent_pid(pid_t pid) {
  const auto stat = read_proc_stat(pid);
  return stat ? stat->parent : 0;
}

/// Returns descriptor `number` of this process if it refers to a page, else that of the nearest ancestor. A program
/// between the agent and the rank may have closed the descriptor, as Python's subprocess does.
Fd find_inherited_fd(int number) {
  const std::string own = "/proc/self/fd/" + std::to_string(number);
  if (read_link(own) == kMemfdLink) {
    ::fcntl(number, F_SETFD, FD_CLOEXEC);
    return Fd(number);
  }
  pid_t pid = ::getppid();
  for (int i = 0; i < kMaxAncestors && pid > 1; ++i, pid = parent_pid(pid)) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
    if (read_link(path) == kMemfdLink) return Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  }
  return {};
}

/// Returns the memory that the agent created for this process or for one of its ancestors; null if there is none. The
/// memory is never freed.
SharedMemory* inherited_memory() {
  static SharedMemory* const memory = []() -> SharedMemory* {
    const auto& number = Env::this_process().lockstep_page;
    const auto value = number ? parse_int(*number) : std::nullopt;
    if (!value || *value <= STDERR_FILENO || *value > INT_MAX) return nullptr;
    Fd fd = find_inherited_fd(static_cast<int>(*value));
    if (!fd) return nullptr;
    try {
      return new SharedMemory(SharedMemory::map(std::move(fd), sizeof(RankPage)));
    } catch (const SystemError&) {
      return nullptr;  // created by another version of Lockstep
    }
  }();
  return memory;
}

/// Returns inherited_memory() unless a running process uses it: a process that a rank has started must not write to the
/// page of that rank.
SharedMemory* unclaimed_memory() {
  SharedMemory* const memory = inherited_memory();
  if (!memory) return nullptr;
  const pid_t owner = rank_page_in(*memory).pid;
  return owner != 0 && owner != ::getpid() && ::kill(owner, 0) == 0 ? nullptr : memory;
}

}  // namespace

RankPage& RankPage::this_process() {
  static RankPage* const page = [] {
    SharedMemory* const inherited = unclaimed_memory();
    static SharedMemory& memory = inherited ? *inherited : *new SharedMemory(create_rank_page());
    ::madvise(memory.data(), memory.size(), MADV_DOFORK);  // a forked child that updates counters must not fault
    return &rank_page_in(memory);
  }();
  return *page;
}

void RankPage::beat() noexcept {
  heartbeats.fetch_add(1, std::memory_order_relaxed);
  if (busy_depth.load(std::memory_order_relaxed) > 0 || output_blocked.load(std::memory_order_relaxed) != 0)
    alive_count.fetch_add(1, std::memory_order_relaxed);
  if (works.load(std::memory_order_relaxed) != 0) work_count.fetch_add(1, std::memory_order_relaxed);
}

bool BlockedThread::is_main_thread() { return ::gettid() == ::getpid(); }

BlockedThread::BlockedThread(bool is_main) : is_main_(is_main) {
  RankPage& page = RankPage::this_process();
  page.waiting.fetch_add(1, std::memory_order_relaxed);
  if (is_main_) page.main_waiting.fetch_add(1, std::memory_order_relaxed);
}

BlockedThread::~BlockedThread() {
  RankPage& page = RankPage::this_process();
  if (is_main_) page.main_waiting.fetch_sub(1, std::memory_order_relaxed);
  page.waiting.fetch_sub(1, std::memory_order_relaxed);
}

bool RankPage::has_agent() { return unclaimed_memory() != nullptr; }

JobKeyBytes inherited_job_key() {
  SharedMemory* const memory = inherited_memory();
  return memory ? rank_page_in(*memory).key : JobKeyBytes{};
}

void publish_to(RankPage& page, const RankIdentity& identity) {
  const auto set_text = [](auto& field, const std::string& text) {
    std::memset(field, 0, sizeof field);
    copy_text(field, text);
  };
  page.magic.store(0, std::memory_order_release);
  page.pid = ::getpid();
  // Yama's ptrace_scope 1 lets only ancestors inspect a process; this permits the agent's tools as well.
  if (page.agent_pid > 0) ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(page.agent_pid), 0, 0, 0);
  page.rank = identity.rank;
  page.world_size = identity.world_size;
  page.published_ticks = ticks();
  page.published_ns = monotonic_ns();
  set_text(page.job, identity.job);
  set_text(page.transport, identity.transport);
  page.magic.store(RankPage::kMagic, std::memory_order_release);
}

namespace {

std::optional<RankSnapshot> read_page_behind(Fd fd) {
  try {
    return read_rank_page(rank_page_in(SharedMemory::map(std::move(fd), sizeof(RankPage))));
  } catch (const SystemError&) {
    return std::nullopt;  // created by another version of Lockstep
  }
}

}  // namespace

std::optional<RankSnapshot> find_rank_page(pid_t pid) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  // Null if the process belongs to another user or has ended.
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), ::closedir);
  if (!entries) return std::nullopt;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string path = folder + "/" + entry->d_name;
    if (read_link(path) != kMemfdLink) continue;
    auto snapshot = read_page_behind(Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC)));
    if (snapshot && snapshot->pid == pid) return snapshot;  // else it is the page of the parent of `pid`
  }
  return std::nullopt;
}

std::vector<RankSnapshot> find_rank_pages() {
  std::vector<RankSnapshot> ranks;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir("/proc"), ::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    const auto pid = parse_int(entry->d_name);
    if (!pid) continue;
    if (auto snapshot = find_rank_page(static_cast<pid_t>(*pid))) ranks.push_back(std::move(*snapshot));
  }
  std::sort(ranks.begin(), ranks.end(), [](const RankSnapshot& a, const RankSnapshot& b) {
    return std::tie(a.job, a.rank, a.pid) < std::tie(b.job, b.rank, b.pid);
  });
  return ranks;
}

}  // namespace lockstep::base::telemetry
