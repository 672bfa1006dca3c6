#include "lockstep/launch/process/process_sample.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "lockstep/base/parse.h"

namespace lockstep::launcher::process {
namespace {

// The positions of fields of /proc/PID/stat after the name; see proc(5).
constexpr std::size_t kState = 0, kUserTime = 11, kSystemTime = 12, kResidentPages = 21;

std::int64_t number_in(const std::string& word) { return base::parse_int(word).value_or(0); }

}  // namespace

ProcessSample sample_process(pid_t pid) {
  ProcessSample sample{.pid = pid, .taken = std::chrono::steady_clock::now()};
  std::string text;
  std::getline(std::ifstream("/proc/" + std::to_string(pid) + "/stat"), text, '\0');
  // The format is "PID (NAME) STATE ...": the name may contain any character, including ')'.
  const std::size_t name_end = text.rfind(") ");
  if (name_end == std::string::npos) return sample;
  const std::vector<std::string> words = base::split(text.substr(name_end + 2), ' ');
  if (words.size() <= kResidentPages || words[kState].empty()) return sample;
  sample.state = words[kState][0];
  const std::int64_t ticks = number_in(words[kUserTime]) + number_in(words[kSystemTime]);
  sample.cpu_time = std::chrono::milliseconds(ticks * 1000 / ::sysconf(_SC_CLK_TCK));
  sample.resident_bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(number_in(words[kResidentPages]), 0)) *
                          static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return sample;
}

std::optional<int> cpu_percent(const ProcessSample& from, const ProcessSample& to) {
  constexpr std::chrono::milliseconds kMinInterval(200);  // the kernel counts in units of 10 ms
  if (from.pid != to.pid || to.taken < from.taken + kMinInterval || to.cpu_time < from.cpu_time) return std::nullopt;
  const std::chrono::duration<double, std::milli> used = to.cpu_time - from.cpu_time, elapsed = to.taken - from.taken;
  return static_cast<int>(100 * used / elapsed + 0.5);
}

}  // namespace lockstep::launcher::process
