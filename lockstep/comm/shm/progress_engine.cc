#include "lockstep/comm/shm/progress_engine.h"

#include "lockstep/base/error.h"
#include "lockstep/comm/arena/arena.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

constexpr auto kSlice = std::chrono::milliseconds(20);  // of waiting, before a look at end() and at who else advances
constexpr auto kRetry = std::chrono::milliseconds(1);   // when somebody else advances a short one

}  // namespace

class Driver::Item final : public Pending {
 public:
  Item(Driver& driver, Step step, bool is_long) : driver_(driver), step_(std::move(step)), is_long_(is_long) {}

  bool done() override {
    if (is_finished()) return true;
    if (driver_.num_long_.load() == 0 && driver_.step_mutex_.try_lock()) {
      const std::lock_guard lock(driver_.step_mutex_, std::adopt_lock);
      while (!is_finished() && driver_.advance(Deadline::in(std::chrono::milliseconds(0)))) {
      }
    }
    return is_finished();
  }

  bool wait_until(Deadline deadline) override {
    while (!is_finished() && !deadline.expired()) {
      const Deadline slice = earlier(deadline, Deadline::in(kSlice));
      // Who has the mutex may keep it for as long as a long operation lasts: this one may be over before.
      if (driver_.num_long_.load() > 0 || !driver_.step_mutex_.try_lock()) {
        Pending::wait_until(earlier(slice, Deadline::in(driver_.num_long_.load() > 0 ? kSlice : kRetry)));
        continue;
      }
      const std::lock_guard lock(driver_.step_mutex_, std::adopt_lock);
      while (!is_finished() && !slice.expired()) driver_.advance(slice);
    }
    return is_finished();
  }

 private:
  friend class Driver;
  Driver& driver_;
  Step step_;
  const bool is_long_;
};

Driver::~Driver() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable())
    thread_.join();  // bounded: the owner has called end(), and a step looks at its abort() every 20 ms
}

PendingPtr Driver::add(Step step, bool is_long) {
  auto item = std::make_shared<Item>(*this, std::move(step), is_long);
  {
    const std::lock_guard lock(mutex_);
    if (ended_) {
      item->finish(ended_);
      return item;
    }
    items_.push_back(item);
    if (is_long) {
      ++num_long_;
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
      changed_.notify_all();
    }
  }
  item->done();  // shows what this rank has, when nothing stands before it
  return item;
}

void Driver::end(const std::exception_ptr& cause) {
  const std::lock_guard lock(mutex_);
  if (!ended_) ended_ = cause;
  for (const auto& item : items_) item->finish(cause);
  items_.clear();
  num_long_ = 0;
}

std::shared_ptr<Driver::Item> Driver::front() const {
  const std::lock_guard lock(mutex_);
  return items_.empty() ? nullptr : items_.front();
}

/// Advances the first item; true when it has ended. The caller holds step_mutex_.
bool Driver::advance(Deadline deadline) {
  const auto item = front();
  if (!item) return false;
  std::exception_ptr error;
  try {
    if (!item->step_(deadline)) return false;
  } catch (const ArenaFull& full) {
    error = std::make_exception_ptr(base::CommError(base::Cause::kResource, "hierarchy", -1, -1, full.what()));
  } catch (...) {
    error = std::current_exception();
  }
  item->step_ = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!items_.empty() && items_.front() == item) {
      items_.pop_front();
      if (item->is_long_) --num_long_;
    }
  }
  item->finish(error);
  return true;
}

void Driver::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || num_long_ > 0; });  // bounded: the destructor sets stop_
    if (stop_) return;
    lock.unlock();
    {
      const std::lock_guard step(step_mutex_);
      if (num_long_ > 0) advance(Deadline::in(kSlice));
    }
    lock.lock();
  }
}

}  // namespace lockstep::comm
