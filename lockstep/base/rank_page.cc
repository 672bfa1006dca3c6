#include "lockstep/base/rank_page.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>

#include "lockstep/base/fd.h"
#include "lockstep/base/shared_memory.h"

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
  std::string result(text, ::strnlen(text, n));
  std::replace_if(result.begin(), result.end(), [](char c) { return std::isprint(static_cast<unsigned char>(c)) == 0; }, '?');
  return result;
}

template <std::size_t n>
void put(char (&place)[n], const std::string& text) {
  const std::size_t length = std::min(text.size(), n - 1);
  std::memcpy(place, text.data(), length);
  place[length] = 0;
}

std::optional<RankSeen> read(const Fd& fd, pid_t pid) {
  alignas(RankPage) char bytes[sizeof(RankPage)];
  if (::pread(fd.get(), bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) return std::nullopt;
  const auto& page = *reinterpret_cast<const RankPage*>(bytes);
  // A forked child has the descriptor as well.
  if (std::memcmp(page.magic, RankPage::kMagic, sizeof page.magic) != 0 || page.pid != pid) return std::nullopt;
  return RankSeen{.pid = pid,
                  .rank = page.rank,
                  .world_size = page.world_size,
                  .job = text_of(page.job),
                  .transport = text_of(page.transport),
                  .exchanges = page.exchanges,
                  .live_bytes = page.arena.live,
                  .peak_live_bytes = page.arena.peak_live,
                  .high_water_bytes = page.arena.high_water,
                  .resident_bytes = page.arena.resident};
}

}  // namespace

RankPage& RankPage::process() {
  static RankPage* const page = [] {
    static SharedMemory* const memory = new SharedMemory(SharedMemory::create(kName, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))));
    ::madvise(memory->data(), memory->size(), MADV_DOFORK);  // a child that counts on must not fault
    return new (memory->data()) RankPage();
  }();
  return *page;
}

void show_process(int rank, int world_size, const std::string& job, const std::string& transport) {
  RankPage& page = RankPage::process();
  page.pid = ::getpid();
  page.rank = rank;
  page.world_size = world_size;
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
    if (auto seen = read(fd, pid)) return seen;
  }
  return std::nullopt;
}

}  // namespace lockstep::base
