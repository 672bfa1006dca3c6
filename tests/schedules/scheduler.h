// A scheduler that explores the interleavings of the ranks of a host. The ranks are fibers of one thread. One runs at a
// time, and the scheduler may switch to another one before and after each atomic operation and at each futex call.
//
// Two strategies take turns. PCT (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding
// bugs", ASPLOS 2010): the runnable rank with the highest of the random priorities runs, and at d - 1 random points the
// running rank gets the lowest priority; with k operations of n ranks, a bug that needs d ordered operations is found
// with a probability of at least 1 / (n k^(d-1)). Random walk: at each point, another rank follows with a random but
// fixed probability, at most a random number of times. All choices follow from one seed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace lockstep::schedules {

// Called by the substitutes for atomics and futexes. Outside a fiber they do nothing.
/// Lets the scheduler choose which fiber continues, or end this one.
void point() noexcept;
/// The fiber can do nothing useful until another one has run.
void yield() noexcept;
/// Blocks the fiber if `must_sleep()`, until futex_wake_all() for the same word, or until a timeout: see run().
void futex_wait(const void* word, const std::function<bool()>& must_sleep) noexcept;
void futex_wake_all(const void* word) noexcept;
/// Calls `read` while points have no effect.
bool without_points(const std::function<bool()>& read) noexcept;

/// Executes one operation, with a point before and after it. With the second one, plain stores that follow an atomic
/// one are not done yet when another rank runs.
template <typename Operation>
auto at_point(const Operation& operation) noexcept {
  point();
  const auto result = operation();
  point();
  return result;
}

/// What may happen in a schedule besides the code of the ranks.
struct Options {
  int num_ranks = 2;
  /// One rank ends at a random point. It then runs no more code, as a process killed by SIGKILL.
  bool kill_one = false;
  /// How many points a schedule usually has; PCT chooses its points among them.
  std::uint64_t length = 256;
};

/// A rank's view of the schedule.
struct Fiber {
  int index = 0;  // the ranks first, then further fibers, which begin when all ranks are ready
  /// Ends the schedule as failed.
  [[noreturn]] static void fail(const std::string& message);
  static void check(bool condition, const std::string& message) {
    if (!condition) fail(message);
  }
  /// Ranks call it when they have made their connections. Points have no effect before all have called it.
  static void ready();
  /// Continues after a random number of points of the others, up to the length of a schedule.
  static void delay();
  /// From now on waits may time out when no fiber can run, and not only after a rank was killed.
  static void allow_timeouts();
};

struct Outcome {
  std::string failure;  // empty if the schedule passed
  std::uint64_t points = 0;
  std::uint64_t switches = 0;
  int killed = -1;  // the rank that was killed
};

/// Runs one schedule: a fiber per body. `on_kill(rank)` is called when a rank is killed.
///
/// A schedule fails if a body throws, if a check fails, if it takes more than `kMaxPoints` points, and if all fibers
/// sleep: then a wake-up was lost. But once a rank was killed or allow_timeouts() was called, a wait times out instead,
/// as every wait of a rank does after 20 ms.
Outcome run(std::uint64_t seed, const Options& options, const std::vector<std::function<void(Fiber&)>>& bodies,
            const std::function<void(int)>& on_kill);

}  // namespace lockstep::schedules
