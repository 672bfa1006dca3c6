#include "lockstep/base/proc_stat.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/base/parse.h"

namespace lockstep::base {
namespace {

// The positions of fields after the name; see proc(5).
constexpr std::size_t kState = 0, kParent = 1, kOwnTimes = 11, kChildrenTimes = 13, kResidentPages = 21;

}  // namespace

std::optional<ProcStat> read_proc_stat(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t size = fd ? ::read(fd.get(), text, sizeof text) : -1;
  if (size <= 0) return std::nullopt;
  // The format is "PID (NAME) STATE PARENT ...": the name may contain any character, including ')'.
  const std::string_view line(text, static_cast<std::size_t>(size));
  const std::size_t begin = line.find(" ("), end = line.rfind(") ");
  if (begin == std::string_view::npos || end == std::string_view::npos || begin > end) return std::nullopt;
  const std::vector<std::string> words = split(line.substr(end + 2), ' ');
  if (words.size() <= kResidentPages || words[kState].empty()) return std::nullopt;
  const auto number = [&](std::size_t field) { return std::max<std::int64_t>(parse_int(words[field]).value_or(0), 0); };
  const auto times = [&](std::size_t first) {  // in user mode, and in the kernel
    return std::chrono::milliseconds((number(first) + number(first + 1)) * 1000 / std::max(::sysconf(_SC_CLK_TCK), 1L));
  };
  return ProcStat{.name = std::string(line.substr(begin + 2, end - begin - 2)),
                  .state = words[kState][0],
                  .parent = static_cast<pid_t>(number(kParent)),
                  .cpu_time = times(kOwnTimes),
                  .children_cpu_time = times(kChildrenTimes),
                  .resident_bytes = static_cast<std::uint64_t>(number(kResidentPages)) *
                                    static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE))};
}

std::optional<ProcStat> read_proc_stat(pid_t pid) { return read_proc_stat("/proc/" + std::to_string(pid) + "/stat"); }

}  // namespace lockstep::base
