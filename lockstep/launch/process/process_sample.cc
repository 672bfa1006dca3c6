#include "lockstep/launch/process/process_sample.h"

#include "lockstep/base/proc_stat.h"

namespace lockstep::launcher::process {
ProcessSample sample_process(pid_t pid) {
  ProcessSample sample{.pid = pid, .taken = std::chrono::steady_clock::now()};
  if (const auto stat = base::read_proc_stat(pid)) {
    sample.state = stat->state;
    sample.cpu_time = stat->cpu_time;
    sample.resident_bytes = stat->resident_bytes;
  }
  return sample;
}

std::optional<int> cpu_percent(const ProcessSample& from, const ProcessSample& to) {
  constexpr std::chrono::milliseconds kMinInterval(200);  // the kernel counts in units of 10 ms
  if (from.pid != to.pid || to.taken < from.taken + kMinInterval || to.cpu_time < from.cpu_time) return std::nullopt;
  const std::chrono::duration<double, std::milli> used = to.cpu_time - from.cpu_time, elapsed = to.taken - from.taken;
  return static_cast<int>(100 * used / elapsed + 0.5);
}

}  // namespace lockstep::launcher::process
