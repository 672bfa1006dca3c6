#include "lockstep/base/log.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "lockstep/base/env.h"

namespace lockstep::base {
namespace {

constexpr int kWriteTimeoutMs = 500;

std::atomic<bool> progress_bar_active = false;

void write_line(std::string_view prefix, std::string_view text) {
  std::string line(progress_bar_active.load(std::memory_order_relaxed) && ::isatty(STDERR_FILENO) == 1 ? "\r\x1b[K"
                                                                                                       : "");
  line.append(prefix);
  line.append(text).append("\n");
  // A paused terminal (Ctrl-S) accepts no data. Drop the line instead of blocking.
  pollfd poll_entry{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&poll_entry, 1, kWriteTimeoutMs) == 0) return;
  // Use one write, so that lines of several processes on one descriptor do not mix. A failure cannot be reported.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

void log_info(std::string_view text) {
  static const bool quiet = Env::this_process().lockstep_log == "quiet";
  if (!quiet) write_line("lockstep: ", text);
}

void log_warning(std::string_view text) { write_line("lockstep: warning: ", text); }

void set_progress_bar_active(bool active) { progress_bar_active.store(active, std::memory_order_relaxed); }

}  // namespace lockstep::base
