#include "lockstep/base/telemetry/rank_page.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <string_view>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "lockstep/base/monotonic.h"
#include "lockstep/base/parse.h"

namespace lockstep::base {
namespace {

constexpr const char* kName = "lockstep-rank";
constexpr std::string_view kLink = "/memfd:lockstep-rank (deleted)";

std::string link_of(const std::string& path) {
  char text[64];
  const ssize_t size = ::readlink(path.c_str(), text, sizeof text);
  return size < 0 ? "" : std::string(text, static_cast<std::size_t>(size));
}

/// Printable, and of the array alone.
template <std::size_t n>
std::string text_of(const char (&text)[n]) {
  return printable(std::string_view(text, ::strnlen(text, n)));
}

template <std::size_t n>
void put(char (&place)[n], const std::string& text) {
  const std::size_t length = std::min(text.size(), n - 1);
  std::memcpy(place, text.data(), length);
  place[length] = 0;
}

/// Of numbers that may be anybody's: it may wrap.
std::int64_t difference(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b));
}

/// The processor's counter has gone evenly since the page was shown. No time is later than now.
void to_nanoseconds(const RankPage& page, RankSeen& seen) {
  const std::int64_t counted = difference(ticks(), page.shown_ticks);
  const double rate =
      counted > 0 ? static_cast<double>(difference(seen.looked_ns, page.shown_ns)) / static_cast<double>(counted) : 1;
  const auto convert = [&](std::int64_t time) {
    const double ago = static_cast<double>(difference(seen.looked_ns, page.shown_ns)) -
                       static_cast<double>(difference(time, page.shown_ticks)) * rate;
    return seen.looked_ns - static_cast<std::int64_t>(std::clamp(ago, 0.0, static_cast<double>(seen.looked_ns - 1)));
  };
  for (FlightSeen& operation : seen.operations) {
    operation.begun = convert(operation.begun);
    if (operation.finished()) operation.ended = convert(operation.ended);
  }
}

std::optional<RankSeen> read(const Fd& fd) {
  const auto copy = std::make_unique<std::uint64_t[]>(sizeof(RankPage) / sizeof(std::uint64_t) + 1);
  if (::pread(fd.get(), copy.get(), sizeof(RankPage), 0) != static_cast<ssize_t>(sizeof(RankPage))) return std::nullopt;
  const auto& page = *reinterpret_cast<const RankPage*>(copy.get());
  if (std::memcmp(page.magic, RankPage::kMagic, sizeof page.magic) != 0) return std::nullopt;
  RankSeen seen{.pid = page.pid,
                .rank = page.rank,
                .world_size = page.world_size,
                .job = text_of(page.job),
                .transport = text_of(page.transport),
                .steps = page.step(),
                .batches = page.batches,
                .exchanges = page.exchanges,
                .waiting = page.waiting != 0,
                .left = page.left != 0,
                .busy_with = page.busy > 0 ? text_of(page.busy_with) : "",
                .live_bytes = page.arena.live,
                .peak_live_bytes = page.arena.peak_live,
                .high_water_bytes = page.arena.high_water,
                .resident_bytes = page.arena.resident,
                .looked_ns = monotonic_ns(),
                .operations = read_flight(page.flight)};
  to_nanoseconds(page, seen);
  return seen;
}

}  // namespace

SharedMemory make_rank_page() { return SharedMemory::create(kName, sizeof(RankPage)); }

// Zeroed at first, as it should be; a constructor would touch all of it.
RankPage& page_in(const SharedMemory& memory) { return *std::launder(reinterpret_cast<RankPage*>(memory.data())); }

namespace {

constexpr int kMaxBetween = 8;  // programs that lie between the agent and a rank

pid_t parent_of(pid_t pid) {
  std::string text;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), text);
  // "PID (NAME) STATE PPID": the name may have anything in it.
  const auto words = split(text.substr(std::min(text.size(), text.rfind(')') + 1)), ' ');
  return words.size() > 2 ? static_cast<pid_t>(parse_int(words[2]).value_or(0)) : 0;
}

/// The descriptor `number` of this process, if it is a page's, or of the nearest one above it: Python's subprocess, for
/// one, closes what it does not know.
Fd given_descriptor(int number) {
  const std::string own = "/proc/self/fd/" + std::to_string(number);
  if (link_of(own) == kLink) {
    ::fcntl(number, F_SETFD, FD_CLOEXEC);
    return Fd(number);
  }
  pid_t pid = ::getppid();
  for (int i = 0; i < kMaxBetween && pid > 1; ++i, pid = parent_of(pid)) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
    if (link_of(path) == kLink) return Fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  }
  return {};
}

/// What whoever watches this process has made for it, or for the rank that has started it. Never freed.
SharedMemory* given_memory() {
  static SharedMemory* const memory = []() -> SharedMemory* {
    const auto& number = Env::process().lockstep_page;
    const auto value = number ? parse_int(*number) : std::nullopt;
    if (!value || *value <= STDERR_FILENO || *value > INT_MAX) return nullptr;
    Fd fd = given_descriptor(static_cast<int>(*value));
    if (!fd) return nullptr;
    try {
      return new SharedMemory(SharedMemory::map(std::move(fd), sizeof(RankPage)));
    } catch (const SystemError&) {
      return nullptr;  // of another version of Lockstep
    }
  }();
  return memory;
}

/// That memory, unless it belongs to another process: one that a rank has started leaves the rank its own.
SharedMemory* free_memory() {
  SharedMemory* const memory = given_memory();
  if (!memory) return nullptr;
  const pid_t owner = page_in(*memory).pid;
  return owner != 0 && owner != ::getpid() && ::kill(owner, 0) == 0 ? nullptr : memory;
}

}  // namespace

RankPage& RankPage::process() {
  static RankPage* const page = [] {
    SharedMemory* const given = free_memory();
    static SharedMemory& memory = given ? *given : *new SharedMemory(make_rank_page());
    ::madvise(memory.data(), memory.size(), MADV_DOFORK);  // a child that counts on must not fault
    return &page_in(memory);
  }();
  return *page;
}

PageKey given_page_key() {
  SharedMemory* const memory = given_memory();
  return memory ? page_in(*memory).key : PageKey{};
}

void show_process(int rank, int world_size, const std::string& job, const std::string& transport) {
  RankPage& page = RankPage::process();
  page.pid = ::getpid();
  // Where a process may be looked at by its ancestors only, our watcher's tools need to be told.
  if (page.watcher > 0) ::prctl(PR_SET_PTRACER, static_cast<unsigned long>(page.watcher), 0, 0, 0);
  page.rank = rank;
  page.world_size = world_size;
  page.shown_ticks = ticks();
  page.shown_ns = monotonic_ns();
  put(page.job, job);
  put(page.transport, transport);
  std::memcpy(page.magic, RankPage::kMagic, sizeof page.magic);
}

std::optional<RankSeen> look_at_rank(pid_t pid) {
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  // Empty when the process is another user's, or has ended.
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), ::closedir);
  if (!entries) return std::nullopt;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string path = folder + "/" + entry->d_name;
    if (link_of(path) != kLink) continue;
    const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) continue;
    auto seen = read(fd);
    if (seen && seen->pid == pid) return seen;  // a child has the descriptor as well
  }
  return std::nullopt;
}

std::optional<RankSeen> look_at_page(const SharedMemory& memory) { return read(memory.fd()); }

}  // namespace lockstep::base
