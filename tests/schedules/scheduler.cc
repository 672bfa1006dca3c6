#include "tests/schedules/scheduler.h"

#include <cxxabi.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <random>
#include <set>

namespace lockstep::schedules {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr std::uint64_t kMaxPoints = 200'000;
constexpr int kNever = -1;

/// What C++ keeps per thread about exceptions in flight; each fiber needs its own.
struct ExceptionState {
  void* caught = nullptr;
  unsigned int uncaught = 0;
};

void swap_exception_state(ExceptionState& own, const ExceptionState& next) {
  auto* current = reinterpret_cast<char*>(abi::__cxa_get_globals());
  std::memcpy(&own.caught, current, sizeof own.caught);
  std::memcpy(&own.uncaught, current + sizeof(void*), sizeof own.uncaught);
  std::memcpy(current, &next.caught, sizeof next.caught);
  std::memcpy(current + sizeof(void*), &next.uncaught, sizeof next.uncaught);
}

/// A stack that later schedules use again.
class Stack {
 public:
  Stack() : data_(::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (data_ == MAP_FAILED) std::abort();
  }
  void* data() const { return data_; }

 private:
  void* data_;
};

Stack& stack(std::size_t index) {
  static auto* all = new std::vector<std::unique_ptr<Stack>>;
  while (all->size() <= index) all->push_back(std::make_unique<Stack>());
  return *(*all)[index];
}

enum class State { kRunnable, kSleeping, kEnded };

struct Context {
  ucontext_t registers{};
  ExceptionState exceptions;
  State state = State::kRunnable;
  const void* word = nullptr;  // while it sleeps
  std::int64_t priority = 0;
  std::uint64_t begins_at = 0;  // a number of points; see delay()
  Fiber fiber;
  const std::function<void(Fiber&)>* body = nullptr;
};

class Schedule {
 public:
  Schedule(std::uint64_t seed, const Options& options, const std::vector<std::function<void(Fiber&)>>& bodies,
           const std::function<void(int)>& on_kill)
      : random_(seed), options_(options), on_kill_(on_kill), fibers_(bodies.size()) {
    is_pct_ = seed % 2 == 0;
    std::vector<std::int64_t> priorities(bodies.size());
    for (std::size_t i = 0; i < priorities.size(); ++i) priorities[i] = static_cast<std::int64_t>(i) + 100;
    std::shuffle(priorities.begin(), priorities.end(), random_);
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      fibers_[i].priority = priorities[i];
      fibers_[i].fiber.index = static_cast<int>(i);
      fibers_[i].body = &bodies[i];
    }
    const std::uint64_t length = std::max<std::uint64_t>(16, options.length);
    if (is_pct_)
      for (std::uint64_t i = below(5); i > 0; --i) changes_.insert(1 + below(length));
    else
      switch_one_in_ = std::uint64_t{2} << below(6);
    spurious_one_in_ = std::uint64_t{2} << below(8);
    max_switches_ = is_pct_ ? ~std::uint64_t{0} : below(4) == 0 ? ~std::uint64_t{0} : 1 + below(24);
    if (options.kill_one) {
      victim_ = static_cast<int>(below(static_cast<std::uint64_t>(options.num_ranks)));
      kill_after_ = 1 + below(length / static_cast<std::uint64_t>(options.num_ranks) + 1);
    }
  }

  Outcome run() {
    active = this;
    for (std::size_t i = 0; i < fibers_.size(); ++i) start(i);
    for (;;) {
      const int next = choose();
      if (next == kNever || failed()) break;
      resume(next);
    }
    active = nullptr;
    return outcome_;
  }

  void point() {
    if (current_ < 0 || paused_ || ready_ < options_.num_ranks) return;
    Context& self = fibers_[static_cast<std::size_t>(current_)];
    if (++outcome_.points > kMaxPoints) fail_now("no end after " + std::to_string(kMaxPoints) + " operations");
    if (current_ == victim_ && ++victim_points_ == kill_after_) kill();
    if (is_pct_) {
      if (changes_.contains(outcome_.points)) self.priority = --lowest_;
      if (best_runnable() != current_) pause();
    } else if (outcome_.switches < max_switches_ && below(switch_one_in_) == 0) {
      pause();
    }
  }

  void yield() {
    if (current_ < 0) return;
    if (ready_ >= options_.num_ranks && ++outcome_.points > kMaxPoints)
      fail_now("no end after " + std::to_string(kMaxPoints) + " operations");
    fibers_[static_cast<std::size_t>(current_)].priority = --lowest_;
    pause();
  }

  void futex_wait(const void* word, const std::function<bool()>& must_sleep) {
    if (current_ < 0) return;
    point();
    if (!must_sleep() || below(spurious_one_in_) == 0) return;  // the latter is a wake-up for no reason
    Context& self = fibers_[static_cast<std::size_t>(current_)];
    self.state = State::kSleeping;
    self.word = word;
    pause();
  }

  void futex_wake_all(const void* word) {
    if (current_ < 0) return;
    point();
    for (Context& fiber : fibers_)
      if (fiber.state == State::kSleeping && fiber.word == word) fiber.state = State::kRunnable;
    point();
  }

  bool without_points(const std::function<bool()>& read) {
    paused_ = true;
    const bool result = read();
    paused_ = false;
    return result;
  }

  void ready() {
    ++ready_;
    while (ready_ < options_.num_ranks) yield();
  }
  void delay() {
    Context& self = fibers_[static_cast<std::size_t>(current_)];
    self.begins_at = outcome_.points + below(std::max<std::uint64_t>(16, options_.length));
    pause();
    self.begins_at = 0;
  }
  void allow_timeouts() { timeouts_allowed_ = true; }

  /// Records the failure and never returns: the schedule ends.
  [[noreturn]] void fail_now(const std::string& message) {
    if (outcome_.failure.empty()) outcome_.failure = message;
    fibers_[static_cast<std::size_t>(current_)].state = State::kEnded;
    pause();
    std::abort();
  }

  static Schedule* active;

 private:
  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }
  bool failed() const { return !outcome_.failure.empty(); }

  void start(std::size_t index) {
    Context& fiber = fibers_[index];
    ::getcontext(&fiber.registers);
    fiber.registers.uc_stack.ss_sp = stack(index).data();
    fiber.registers.uc_stack.ss_size = kStackBytes;
    fiber.registers.uc_link = nullptr;
    ::makecontext(&fiber.registers, &Schedule::enter, 0);
  }

  static void enter() {
    Schedule& self = *active;
    Context& fiber = self.fibers_[static_cast<std::size_t>(self.current_)];
    std::string error;
    try {
      (*fiber.body)(fiber.fiber);
    } catch (const std::exception& exception) {
      error = exception.what();
    }
    if (!error.empty() && self.outcome_.failure.empty())
      self.outcome_.failure = "fiber " + std::to_string(fiber.fiber.index) + ": " + error;
    fiber.state = State::kEnded;
    self.pause();
    std::abort();  // never resumed
  }

  void resume(int index) {
    if (index != last_) ++outcome_.switches;
    last_ = current_ = index;
    Context& next = fibers_[static_cast<std::size_t>(index)];
    swap_exception_state(own_exceptions_, next.exceptions);
    ::swapcontext(&own_registers_, &next.registers);
    current_ = -1;
  }

  void pause() {
    Context& self = fibers_[static_cast<std::size_t>(current_)];
    swap_exception_state(self.exceptions, own_exceptions_);
    ::swapcontext(&self.registers, &own_registers_);
  }

  void kill() {
    outcome_.killed = victim_;
    timeouts_allowed_ = true;
    fibers_[static_cast<std::size_t>(victim_)].state = State::kEnded;
    on_kill_(victim_);
    pause();
  }

  /// Fibers that are not ranks begin when all ranks are ready.
  bool is_runnable(std::size_t index) const {
    return fibers_[index].state == State::kRunnable &&
           (ready_ >= options_.num_ranks || index < static_cast<std::size_t>(options_.num_ranks)) &&
           outcome_.points >= fibers_[index].begins_at;
  }

  int best_runnable() const {
    int best = kNever;
    for (std::size_t i = 0; i < fibers_.size(); ++i)
      if (is_runnable(i) && (best == kNever || fibers_[i].priority > fibers_[static_cast<std::size_t>(best)].priority))
        best = static_cast<int>(i);
    return best;
  }

  int random_runnable() {
    std::vector<int> all;
    for (std::size_t i = 0; i < fibers_.size(); ++i)
      if (is_runnable(i)) all.push_back(static_cast<int>(i));
    return all.empty() ? kNever : all[below(all.size())];
  }

  /// The fiber that runs next; kNever at the end.
  int choose() {
    const bool connecting = ready_ < options_.num_ranks;
    const int next = is_pct_ || connecting ? best_runnable() : random_runnable();
    if (next != kNever) return next;
    for (std::size_t i = 0; i < fibers_.size(); ++i)
      if (fibers_[i].state == State::kRunnable && fibers_[i].begins_at > 0) return static_cast<int>(i);
    std::vector<int> sleeping;
    for (std::size_t i = 0; i < fibers_.size(); ++i)
      if (fibers_[i].state == State::kSleeping) sleeping.push_back(static_cast<int>(i));
    if (sleeping.empty()) return kNever;
    if (!timeouts_allowed_) {
      outcome_.failure = "lost wake-up: fiber " + std::to_string(sleeping.front()) + " and all others sleep";
      return kNever;
    }
    const int woken = sleeping[below(sleeping.size())];
    fibers_[static_cast<std::size_t>(woken)].state = State::kRunnable;
    return woken;
  }

  std::mt19937_64 random_;
  const Options options_;
  const std::function<void(int)>& on_kill_;
  std::vector<Context> fibers_;
  ucontext_t own_registers_{};
  ExceptionState own_exceptions_;
  int current_ = -1, last_ = -1;
  int ready_ = 0;
  bool paused_ = false;
  bool is_pct_ = false;
  std::set<std::uint64_t> changes_;
  std::uint64_t switch_one_in_ = 1, max_switches_ = 0, spurious_one_in_ = 1;
  std::int64_t lowest_ = 0;
  int victim_ = kNever;
  std::uint64_t victim_points_ = 0, kill_after_ = 0;
  bool timeouts_allowed_ = false;
  Outcome outcome_;
};

Schedule* Schedule::active = nullptr;

}  // namespace

void point() noexcept {
  if (Schedule::active) Schedule::active->point();
}
void yield() noexcept {
  if (Schedule::active) Schedule::active->yield();
}
void futex_wait(const void* word, const std::function<bool()>& must_sleep) noexcept {
  if (Schedule::active) Schedule::active->futex_wait(word, must_sleep);
}
void futex_wake_all(const void* word) noexcept {
  if (Schedule::active) Schedule::active->futex_wake_all(word);
}
bool without_points(const std::function<bool()>& read) noexcept {
  return Schedule::active ? Schedule::active->without_points(read) : read();
}

void Fiber::fail(const std::string& message) { Schedule::active->fail_now(message); }
void Fiber::ready() { Schedule::active->ready(); }
void Fiber::delay() { Schedule::active->delay(); }
void Fiber::allow_timeouts() { Schedule::active->allow_timeouts(); }

Outcome run(std::uint64_t seed, const Options& options, const std::vector<std::function<void(Fiber&)>>& bodies,
            const std::function<void(int)>& on_kill) {
  return Schedule(seed, options, bodies, on_kill).run();
}

}  // namespace lockstep::schedules
