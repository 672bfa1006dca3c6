// The progress line of a training run.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/base/env.h"
#include "lockstep/train/loggers/logger.h"

namespace lockstep::training::inline report {

/// The values that a progress line displays.
struct ProgressBarState {
  std::string label = {};  ///< at the start of the line, unless empty
  std::int64_t epoch = 0;  ///< from 0; displayed when num_epochs is above 1
  std::int64_t num_epochs = 1;
  std::int64_t step = 0;       ///< steps done in this epoch
  std::int64_t num_steps = 1;  ///< in an epoch
  NamedValues values = {};
  double samples_per_second = -1;  ///< negative: unknown, not displayed
  double steps_per_second = -1;    ///< likewise; displayed when samples/s are unknown
  double comm_fraction = -1;       ///< of a step, in operations between ranks; negative: not displayed
  double seconds_left = -1;        ///< negative: unknown
};

/// Formats the line, without a line end:
///   epoch 2/3  ━━━━━━━━━━━━━━━━━━━━╸─────────  68%  612/900  loss 1.482  acc 0.551  3.1k samples/s  comm 12%  ETA 0:41
/// The line is narrower than `columns`: first the bar is shortened, then the least important fields are dropped. With 0
/// columns (no terminal) it has all fields except the bar. Pure.
std::string format_progress_line(const ProgressBarState& state, int columns);

/// Returns the width of the terminal that stdout is connected to, directly or through the launcher; 0 without a
/// terminal, or for one that cannot redraw a line.
int terminal_columns(const base::Env& env);

struct ProgressBarOptions {
  std::string label = {};  ///< at the start of each line, such as "validation"
  std::int64_t num_epochs = 1;
  std::int64_t steps_per_epoch = 1;
  std::int64_t steps_done = 0;                     ///< by earlier runs, when a run resumes
  std::int64_t samples_per_step = 0;               ///< of all ranks together; 0: display steps/s instead of samples/s
  bool comm = false;                               ///< display the fraction of steps in operations between ranks, on
                                                   ///< CPUs: what a GPU waits for is not seen
  std::chrono::milliseconds redraw_interval{200};  ///< between two redraws on a terminal
  std::chrono::milliseconds line_interval{10000};  ///< between two lines when stdout is not a terminal
  bool keep_last_line = true;  ///< keep the last line of an epoch on a terminal and always write it elsewhere;
                               ///< otherwise erase it, and elsewhere write it only when it is due
};

/// Writes the progress of a training run to stdout on rank 0 and does nothing on other ranks. On a terminal it redraws
/// one line in the terminal's current width; elsewhere it writes a line every `line_interval`. The last line of an
/// epoch stays unless keep_last_line is false. Lines of base/log.h and print_line() appear above the progress line;
/// other output to the terminal appears after it, and the progress line is redrawn in the next row. On a terminal that
/// does not accept output (Ctrl-S), redraws are skipped and lines that stay block for at most half a second. Used by
/// one thread.
class ProgressBar {
 public:
  /// Throws UsageError for fewer than one epoch or step, and for negative counts or intervals.
  ProgressBar(int rank, const ProgressBarOptions& options);
  /// Leaves the cursor at the beginning of a row.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Counts one step; the step after the last of an epoch starts a new epoch. Time between epochs is not included in
  /// rates. Does not block on a redraw. A call that draws nothing takes tens of nanoseconds.
  void step(const NamedValues& values = {}) {
    if (count_step()) draw(values);
  }
  /// The same, but calls values() only when the line is drawn, for values that are expensive to read, such as those on
  /// a GPU.
  template <std::invocable Values>
  void step(Values values) {
    if (count_step()) draw(values());
  }
  /// Writes a line above the progress line, to stdout.
  void print_line(std::string_view line);

 private:
  using Clock = std::chrono::steady_clock;
  enum class OutputKind { kNone, kTerminal, kLauncher };

  bool count_step();
  void draw(const NamedValues& values);
  void update_step_time(Clock::time_point now, bool first_of_epoch);
  void write(std::string text, bool wait_for_terminal);

  ProgressBarOptions options_;
  bool is_enabled_;
  OutputKind output_ = OutputKind::kNone;
  std::int64_t steps_;        // of all epochs
  double step_seconds_ = -1;  // smoothed; negative: unknown
  double comm_seconds_ = 0;   // of a step, smoothed likewise
  std::int64_t last_comm_ns_ = 0;
  Clock::time_point last_step_;
  Clock::time_point last_drawn_;
  bool has_open_row_ = false;  // the cursor is on a progress line that will be redrawn
};

}  // namespace lockstep::training::inline report
