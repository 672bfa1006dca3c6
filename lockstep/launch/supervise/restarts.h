// Whether a job that has failed is started again, and after which pause: a function of how its starts have ended.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "lockstep/launch/supervise/verdict.h"

namespace lockstep::launcher {

/// Whether another start may end otherwise: what a person has to mend, what comes again by itself, and what was
/// somebody's wish is not worth one. Pure.
bool is_restartable(const Verdict& verdict);

/// What counts of a start of the job beside its verdict.
struct Attempt {
  bool started = true;     ///< its ranks were started
  std::int64_t saved = 0;  ///< the newest checkpoint that its ranks have told of; 0: none
  std::chrono::milliseconds duration{0};
};

class Restarts {
 public:
  /// At most `most` of them. The pause before the first one is `first_pause`; it doubles up to 60 s, and begins anew
  /// after progress.
  Restarts(int most, std::chrono::milliseconds first_pause)
      : max_restarts_(most), first_pause_(first_pause), pause_(first_pause) {}

  /// A start has ended by `verdict`. The pause before the next one; nothing when there is to be none, and then
  /// `verdict` says so: by itself when it is not worth one, in its detail when all restarts are used up, and as
  /// kNoProgress when three in a row have begun and brought no newer checkpoint.
  std::optional<std::chrono::milliseconds> next(const Attempt& attempt, Verdict& verdict);

  /// How many have been decided on: the generation of the next start.
  int num_restarts() const { return num_restarts_; }
  /// The newest checkpoint of all starts; 0: none is known.
  std::int64_t newest_checkpoint() const { return newest_checkpoint_; }
  /// Whether the last start brought a newer one. Of a program that has never told of any, as one that saves in its own
  /// way, a start that lasted ten minutes counts.
  bool made_progress() const { return made_progress_; }

 private:
  void record(const Attempt& attempt);

  const int max_restarts_;
  const std::chrono::milliseconds first_pause_;
  std::chrono::milliseconds pause_;  // the next one
  int num_restarts_ = 0;
  int without_progress_ = 0;  // restarts in a row without progress
  std::int64_t newest_checkpoint_ = 0;
  bool made_progress_ = false;
};

}  // namespace lockstep::launcher
