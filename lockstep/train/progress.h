// The line that shows how far a training is.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/env.h"
#include "lockstep/comm/group.h"

namespace lockstep::train {

/// What the line shows, in this order: {"loss", 1.482}, {"acc", 0.551}.
using NamedValues = std::vector<std::pair<std::string, double>>;

struct ProgressState {
  std::int64_t epoch = 0;           ///< from 0; shown when there are several
  std::int64_t num_epochs = 1;
  std::int64_t step = 0;            ///< steps done in this epoch
  std::int64_t num_steps = 1;       ///< in an epoch
  NamedValues values = {};
  double samples_per_second = -1;   ///< negative: not known, not shown
  double seconds_left = -1;         ///< likewise
};

/// The line without its end:
///   epoch 2/3  ━━━━━━━━━━━━━━━━━━━━╸─────────  68%  612/900  loss 1.482  acc 0.551  3.1k samples/s  ETA 0:41
/// It is narrower than `columns`, for which the bar is shortened and then the fields that matter least are left out. With 0
/// columns (no terminal) it has every field but the bar. Pure.
std::string progress_line(const ProgressState& state, int columns);

/// Columns of the terminal that stdout ends in, behind a launcher or not; 0 when it ends elsewhere or cannot redraw a line.
int terminal_columns(const base::Env& env);

struct ProgressOptions {
  std::int64_t num_epochs = 1;
  std::int64_t steps_per_epoch = 1;
  std::int64_t samples_per_step = 0;  ///< of all ranks together; 0: samples/s is not shown
  std::chrono::milliseconds line_every = std::chrono::seconds(10);  ///< where stdout is no terminal
};

/// Writes to stdout of rank 0; the other ranks' do nothing. On a terminal one line is drawn again and again, at most ten
/// times a second; elsewhere a line is written every `line_every`. The last line of an epoch always stays. Used by one thread.
class Progress {
 public:
  /// Throws UsageError for fewer than one epoch or step.
  Progress(const comm::Group& world, const ProgressOptions& options);
  /// Leaves the cursor at the beginning of a row.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// One more step is done; after the last of an epoch the next one begins a new epoch. Time between two epochs is not
  /// counted as training. Waits for nobody.
  void step(const NamedValues& values = {});

 private:
  using Clock = std::chrono::steady_clock;

  void measure(Clock::time_point now, bool first_of_epoch);
  void draw(const ProgressState& state, bool last_of_epoch);

  ProgressOptions options_;
  bool shown_;
  int columns_ = 0;
  std::int64_t steps_ = 0;           // of all epochs
  double step_seconds_ = -1;         // smoothed; negative: not known
  Clock::time_point last_step_;
  Clock::time_point last_line_;
  std::size_t row_width_ = 0;        // of what stands on the row, which the next line must cover
};

}  // namespace lockstep::train
