#include "lockstep/comm/shm/progress_engine.h"

#include "lockstep/base/error.h"
#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

// A waiting thread checks this often whether another thread still runs a foreground operation.
constexpr auto kRetryInterval = std::chrono::milliseconds(1);

}  // namespace

class ProgressEngine::QueuedOp final : public Pending {
 public:
  QueuedOp(ProgressEngine& engine, AdvanceFn advance_fn, bool is_background)
      : engine_(engine), advance_fn_(std::move(advance_fn)), is_background_(is_background) {}

  bool done() override {
    if (is_finished()) return true;
    if (engine_.num_background_.load() == 0 && engine_.advance_mutex_.try_lock()) {
      const std::lock_guard lock(engine_.advance_mutex_, std::adopt_lock);
      while (!is_finished() && engine_.advance(Deadline::in(std::chrono::milliseconds(0)))) {
      }
    }
    return is_finished();
  }

  bool wait_until(Deadline deadline) override {
    while (!is_finished() && !deadline.expired()) {
      const Deadline slice = earlier(deadline, Deadline::in(kAbortCheckInterval));
      // The thread that holds the mutex may keep it for a whole background operation; this operation may end earlier.
      if (engine_.num_background_.load() > 0 || !engine_.advance_mutex_.try_lock()) {
        Pending::wait_until(
            earlier(slice, Deadline::in(engine_.num_background_.load() > 0 ? kAbortCheckInterval : kRetryInterval)));
        continue;
      }
      const std::lock_guard lock(engine_.advance_mutex_, std::adopt_lock);
      while (!is_finished() && !slice.expired()) engine_.advance(slice);
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
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable())
    thread_.join();  // bounded: the owner has called abort(), and an AdvanceFn checks for the owner's abort every 20 ms
}

PendingPtr ProgressEngine::add(AdvanceFn advance_fn, bool is_background) {
  auto item = std::make_shared<QueuedOp>(*this, std::move(advance_fn), is_background);
  {
    const std::lock_guard lock(mutex_);
    if (abort_cause_) {
      item->finish(abort_cause_);
      return item;
    }
    items_.push_back(item);
    if (is_background) {
      ++num_background_;
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
      changed_.notify_all();
    }
  }
  item->done();  // publishes this rank's data if nothing is queued before it
  return item;
}

void ProgressEngine::abort(const std::exception_ptr& cause) {
  const std::lock_guard lock(mutex_);
  if (!abort_cause_) abort_cause_ = cause;
  for (const auto& item : items_) item->finish(cause);
  items_.clear();
  num_background_ = 0;
}

std::shared_ptr<ProgressEngine::QueuedOp> ProgressEngine::front() const {
  const std::lock_guard lock(mutex_);
  return items_.empty() ? nullptr : items_.front();
}

/// Makes progress on the first operation. Returns true when it has ended. The caller holds advance_mutex_.
bool ProgressEngine::advance(Deadline deadline) {
  const auto item = front();
  if (!item) return false;
  std::exception_ptr error;
  try {
    if (!item->advance_fn_(deadline)) return false;
  } catch (const ArenaFull& full) {
    error = std::make_exception_ptr(base::CommError(base::Cause::kResource, "hierarchy", -1, -1, full.what()));
  } catch (...) {
    error = std::current_exception();
  }
  item->advance_fn_ = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!items_.empty() && items_.front() == item) {
      items_.pop_front();
      if (item->is_background_) --num_background_;
    }
  }
  item->finish(error);
  return true;
}

void ProgressEngine::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || num_background_ > 0; });  // bounded: the destructor sets stop_
    if (stop_) return;
    lock.unlock();
    {
      const std::lock_guard advance_lock(advance_mutex_);
      if (num_background_ > 0) advance(Deadline::in(kAbortCheckInterval));
    }
    lock.lock();
  }
}

}  // namespace lockstep::comm
