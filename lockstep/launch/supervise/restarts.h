// Decides whether a failed job is restarted, and after which pause: a function of how its previous generations ended.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "lockstep/launch/supervise/verdict.h"

namespace lockstep::launcher {

/// True if a restart may succeed. Returns false for failures that a user has to fix, that would happen again, or that
/// were requested. Pure.
bool is_restartable(const Verdict& verdict);

/// What counts about a generation besides its verdict.
struct Attempt {
  bool started = true;                 ///< its ranks were started
  std::int64_t newest_checkpoint = 0;  ///< number of the newest checkpoint that its ranks have reported; 0: none
  std::chrono::milliseconds duration{0};
};

/// Counts restarts and checks for progress between them. Has no clock and does not block.
class Restarts {
 public:
  /// Allows at most `max_restarts`. The first pause is `first_pause`; it doubles up to 60 s and is reset by progress.
  Restarts(int max_restarts, std::chrono::milliseconds first_pause)
      : max_restarts_(max_restarts), first_pause_(first_pause), pause_(first_pause) {}

  /// Call it when a generation has ended with `verdict`. Returns the pause before the next generation; nothing if there
  /// is none. In that case `verdict` says why: its cause is not worth a restart, its detail says that all restarts are
  /// used up, or its cause becomes kNoProgress because three restarts in a row produced no newer checkpoint.
  std::optional<std::chrono::milliseconds> next(const Attempt& attempt, Verdict& verdict);

  /// The number of restarts so far: the generation of the next start.
  int num_restarts() const { return num_restarts_; }
  /// The newest checkpoint of all generations; 0: none.
  std::int64_t newest_checkpoint() const { return newest_checkpoint_; }
  /// True if the last generation produced a newer checkpoint. If the program has never reported a checkpoint (it may
  /// save in its own way), a generation of at least ten minutes counts as progress.
  bool made_progress() const { return made_progress_; }

 private:
  void record(const Attempt& attempt);

  const int max_restarts_;
  const std::chrono::milliseconds first_pause_;
  std::chrono::milliseconds pause_;  // the next pause
  int num_restarts_ = 0;
  int without_progress_ = 0;  // restarts in a row without progress
  std::int64_t newest_checkpoint_ = 0;
  bool made_progress_ = false;
};

}  // namespace lockstep::launcher
