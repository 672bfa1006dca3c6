// The line that shows how far a training is.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/base/env.h"
#include "lockstep/train/loggers/named_values.h"

namespace lockstep::train {

struct ProgressBarState {
  std::string label = {};  ///< in front, when not empty
  std::int64_t epoch = 0;  ///< from 0; shown when there are several
  std::int64_t num_epochs = 1;
  std::int64_t step = 0;       ///< steps done in this epoch
  std::int64_t num_steps = 1;  ///< in an epoch
  NamedValues values = {};
  double samples_per_second = -1;  ///< negative: not known, not shown
  double steps_per_second = -1;    ///< likewise; shown where samples/s are not known
  double seconds_left = -1;        ///< likewise
};

/// The line without its end:
///   epoch 2/3  ━━━━━━━━━━━━━━━━━━━━╸─────────  68%  612/900  loss 1.482  acc 0.551  3.1k samples/s  ETA 0:41
/// It is narrower than `columns`, for which the bar is shortened and then the fields that matter least are left out.
/// With 0 columns (no terminal) it has every field but the bar. Pure.
std::string format_progress_line(const ProgressBarState& state, int columns);

/// Columns of the terminal that stdout ends in, behind a launcher or not; 0 when it ends elsewhere or cannot redraw a
/// line.
int terminal_columns(const base::Env& env);

struct ProgressBarOptions {
  std::string label = {};  ///< "validation": in front of each line
  std::int64_t num_epochs = 1;
  std::int64_t steps_per_epoch = 1;
  std::int64_t steps_done = 0;                     ///< before, by a run that this one goes on from
  std::int64_t samples_per_step = 0;               ///< of all ranks together; 0: steps/s is shown instead of samples/s
  std::chrono::milliseconds redraw_interval{200};  ///< on a terminal
  std::chrono::milliseconds line_interval{10000};  ///< where stdout is no terminal
  bool keep_last_line =
      true;  ///< the last line of an epoch; else it goes, and without a terminal it is one like others
};

/// Writes to stdout of rank 0; the other ranks' do nothing. On a terminal one line is drawn again and again, as wide as
/// the terminal is then; elsewhere a line is written every `line_interval`. The last line of an epoch always stays,
/// unless an option says otherwise. Lines of base/log.h and of print() appear above it; what others write to a terminal
/// comes behind it, and it is drawn anew in the next row. A terminal that takes nothing (Ctrl-S) is not waited for, but
/// half a second for a line that stays. Used by one thread.
class Progress {
 public:
  /// Throws UsageError for fewer than one epoch or step, a negative number or a negative time.
  Progress(int rank, const ProgressBarOptions& options);
  /// Leaves the cursor at the beginning of a row.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// One more step is done; after the last of an epoch the next one begins a new epoch. Time between two epochs is not
  /// counted as training. Waits for nobody. Where nothing is drawn it takes some nanoseconds.
  void step(const NamedValues& values = {}) {
    if (count_step()) draw(values);
  }
  /// The same, and values() is called only when the line is drawn: for what costs time, as a number that lies on a GPU.
  template <std::invocable Values>
  void step(Values values) {
    if (count_step()) draw(values());
  }
  /// A whole line above it, on stdout.
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
  double step_seconds_ = -1;  // smoothed; negative: not known
  Clock::time_point last_step_;
  Clock::time_point last_drawn_;
  bool has_open_row_ = false;  // a line that does not stay stands on the row
};

}  // namespace lockstep::train
