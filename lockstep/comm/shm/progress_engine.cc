#include "lockstep/comm/shm/progress_engine.h"

#include "lockstep/base/check.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm::shm {

using base::Deadline;

// A thread that waits while another one advances operations tries this often to continue them itself.
constexpr auto kTakeOverInterval = std::chrono::milliseconds(1);

class ProgressEngine::QueuedOp final : public Pending {
 public:
  QueuedOp(ProgressEngine& engine, AdvanceFn advance_fn, bool is_background)
      : engine_(engine), advance_fn_(std::move(advance_fn)), is_background_(is_background) {}

  bool done() override {
    if (!is_finished() && engine_.mutex_.try_lock()) {
      const std::lock_guard lock(engine_.mutex_, std::adopt_lock);
      engine_.advance_until_done(*this, Deadline::in(std::chrono::milliseconds(0)));
    }
    return is_finished();
  }

  bool wait_until(Deadline deadline) override {
    while (!is_finished() && !deadline.expired()) {
      const Deadline slice = earlier(deadline, Deadline::in(kAbortCheckInterval));
      if (engine_.num_background_.load(std::memory_order_relaxed) > 0) {
        Pending::wait_until(slice);  // the engine's thread runs this operation
        continue;
      }
      if (!engine_.mutex_.try_lock()) {  // another thread advances, perhaps past this operation
        Pending::wait_until(earlier(deadline, Deadline::in(kTakeOverInterval)));
        continue;
      }
      const std::lock_guard lock(engine_.mutex_, std::adopt_lock);
      engine_.advance_until_done(*this, slice);
    }
    return is_finished();
  }

 private:
  friend class ProgressEngine;
  ProgressEngine& engine_;
  AdvanceFn advance_fn_;
  const bool is_background_;
};

ProgressEngine::~ProgressEngine() {
  {
    const std::lock_guard lock(mutex_);  // blocks while another thread advances an operation
    if (aborted_.load(std::memory_order_acquire)) finish_aborted();
    LOCKSTEP_CHECK(items_.empty());
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable())
    thread_.join();  // bounded: the owner has called abort(), and an AdvanceFn checks for the owner's abort every 20 ms
}

PendingPtr ProgressEngine::add(AdvanceFn advance_fn) {
  auto item = std::make_shared<QueuedOp>(*this, std::move(advance_fn), /*is_background=*/false);
  const std::lock_guard lock(mutex_);
  items_.push_back(item);
  advance_until_done(*item, Deadline::in(std::chrono::milliseconds(0)));
  return item;
}

PendingPtr ProgressEngine::add_background(AdvanceFn advance_fn) {
  auto item = std::make_shared<QueuedOp>(*this, std::move(advance_fn), /*is_background=*/true);
  const std::lock_guard lock(mutex_);
  const bool aborted = aborted_.load(std::memory_order_acquire);
  if (!aborted && !thread_.joinable()) thread_ = base::start_thread([this] { run_in_background(); });  // may throw
  items_.push_back(item);
  ++num_background_;
  if (aborted) {
    finish_aborted();
    return item;
  }
  changed_.notify_all();
  return item;
}

void ProgressEngine::abort(const std::exception_ptr& cause) noexcept {
  if (aborted_.load(std::memory_order_relaxed)) return;
  abort_cause_ = cause;
  aborted_.store(true, std::memory_order_release);
  // If another thread holds the mutex, that thread or the next one that waits for an operation finishes the operations.
  if (!mutex_.try_lock()) return;
  const std::lock_guard lock(mutex_, std::adopt_lock);
  finish_aborted();
}

/// Returns the error of an operation whose AdvanceFn has thrown the exception that is being handled.
std::exception_ptr ProgressEngine::handled_error() const {
  try {
    throw;
  } catch (const arena::ArenaFull& full) {
    return std::make_exception_ptr(base::CommError(full.cause(), name_, -1, -1, full.what(), full.hint()));
  } catch (...) {
    return std::current_exception();
  }
}

/// Advances the operations up to `target`, in order, until `deadline`. Does nothing while background operations are
/// queued. The caller holds mutex_.
void ProgressEngine::advance_until_done(const QueuedOp& target, Deadline deadline) {
  const auto may_advance = [&] {
    return !target.is_finished() && num_background_.load(std::memory_order_relaxed) == 0 &&
           !aborted_.load(std::memory_order_acquire);
  };
  while (may_advance()) {
    std::exception_ptr error;
    try {
      if (!items_.front()->advance_fn_(deadline)) break;
    } catch (...) {
      error = handled_error();
    }
    finish_front(error);
  }
  if (aborted_.load(std::memory_order_acquire)) finish_aborted();
}

/// The caller holds mutex_. The operation releases its resources before a waiting thread continues.
void ProgressEngine::finish_front(const std::exception_ptr& error) {
  const std::shared_ptr<QueuedOp> item = std::move(items_.front());
  items_.pop_front();
  item->advance_fn_ = nullptr;
  if (item->is_background_) --num_background_;
  item->finish(error);
}

/// Finishes all operations with the cause of the abort. The caller holds mutex_ and has read aborted_ as true.
void ProgressEngine::finish_aborted() {
  for (const auto& item : items_) item->finish(abort_cause_);
  items_.clear();
  num_background_ = 0;
}

void ProgressEngine::run_in_background() {
  std::unique_lock lock(mutex_);
  for (;;) {
    // bounded: the destructor sets stop_
    base::wait_until(changed_, lock, base::Deadline::never(), [this] { return stop_ || num_background_ > 0; });
    if (stop_) return;
    // While a background operation is queued, only this thread removes operations, except after an abort.
    const std::shared_ptr<QueuedOp> item = items_.front();
    std::exception_ptr error;
    bool ended = false;
    if (!aborted_.load(std::memory_order_acquire)) {
      lock.unlock();
      try {
        ended = item->advance_fn_(Deadline::in(kAbortCheckInterval));
      } catch (...) {
        error = handled_error();
        ended = true;
      }
      lock.lock();
    }
    if (aborted_.load(std::memory_order_acquire))
      finish_aborted();
    else if (ended)
      finish_front(error);
  }
}

}  // namespace lockstep::comm::shm
