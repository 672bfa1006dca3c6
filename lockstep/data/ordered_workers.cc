#include "lockstep/data/ordered_workers.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep::data {
namespace {

// condition_variable's own arithmetic overflows at time_point::max().
template <typename Predicate>
bool wait_until(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, base::Deadline deadline,
                Predicate done) {
  while (!done()) {
    if (deadline.expired()) return false;
    condition.wait_for(lock, std::min(deadline.remaining(), std::chrono::milliseconds(60'000)));
  }
  return true;
}

}  // namespace

// Shared with every thread, so that one which is left behind finds it alive.
struct OrderedWorkers::State {
  struct Slot {
    bool ready = false;
    std::shared_ptr<void> item;
    std::exception_ptr error;
  };

  State(std::uint64_t items, std::uint64_t window) : num_items(items), slots(window) {}

  void work(const ItemMaker& make);
  Slot& slot_of(std::uint64_t number) { return slots[number % slots.size()]; }
  // Under the mutex: a thread may begin the next thing when its slot is free.
  bool has_free_slot() const { return next_started < next_taken + slots.size(); }

  const std::uint64_t num_items;
  std::stop_source stop;

  std::mutex mutex;                    // guards all below
  std::condition_variable slot_freed;  // a slot is free, or a stop is requested
  std::condition_variable ready;       // a slot is filled, or a thread has ended
  std::vector<Slot> slots;
  std::uint64_t next_started = 0;
  std::uint64_t next_taken = 0;
  std::size_t num_running = 0;
};

void OrderedWorkers::State::work(const ItemMaker& make) {
  const auto token = stop.get_token();
  std::unique_lock lock(mutex);
  for (;;) {
    wait_until(slot_freed, lock, base::Deadline::never(),  // bounded: the owner's destructor requests a stop
               [&] { return token.stop_requested() || next_started >= num_items || has_free_slot(); });
    if (token.stop_requested() || next_started >= num_items) break;
    const std::uint64_t number = next_started++;
    lock.unlock();
    Slot made{.ready = true, .item = nullptr, .error = nullptr};
    try {
      made.item = make(number, token);
    } catch (...) {
      made.error = std::current_exception();
    }
    lock.lock();
    slot_of(number) = std::move(made);
    ready.notify_all();
  }
  slot_freed.notify_all();
}

OrderedWorkers::OrderedWorkers(std::uint64_t num_items, std::vector<ItemMaker> makers, std::uint64_t window,
                               std::chrono::milliseconds stop_timeout)
    : state_(std::make_shared<State>(num_items, window)), stop_timeout_(stop_timeout) {
  const std::size_t num_threads = makers.size();
  threads_.reserve(num_threads);
  try {
    for (auto& make : makers) {
      {
        const std::lock_guard lock(state_->mutex);
        ++state_->num_running;
      }
      threads_.emplace_back([state = state_, make = std::move(make)]() mutable {
        state->work(make);
        make = nullptr;  // the dataset's copy goes before the thread counts as ended
        const std::lock_guard lock(state->mutex);
        --state->num_running;
        state->ready.notify_all();
      });
    }
  } catch (const std::system_error& error) {
    {
      const std::lock_guard lock(state_->mutex);
      --state_->num_running;
    }
    const std::string which = std::to_string(threads_.size() + 1) + " of " + std::to_string(num_threads);
    stop(base::Deadline::in(stop_timeout_));
    throw base::SystemError("cannot start loader thread " + which, error.code().value());
  }
}

OrderedWorkers::~OrderedWorkers() { stop(base::Deadline::in(stop_timeout_)); }

void OrderedWorkers::stop(base::Deadline deadline) {
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->stop.request_stop();
    state_->slot_freed.notify_all();
    ended = wait_until(state_->ready, lock, deadline, [&] { return state_->num_running == 0; });
  }
  if (!ended)
    base::log_warning("a loader thread is still inside the dataset " + std::to_string(stop_timeout_.count()) +
                      " ms after it was told to stop; it is left behind");
  for (auto& thread : threads_) {
    if (ended)
      thread.join();  // bounded: the thread has nothing left to do
    else
      thread.detach();
  }
}

OrderedWorkers::Outcome OrderedWorkers::next(std::shared_ptr<void>& item, base::Deadline deadline) {
  State::Slot taken;
  {
    std::unique_lock lock(state_->mutex);
    if (state_->next_taken >= state_->num_items) return Outcome::kEnd;
    State::Slot& slot = state_->slot_of(state_->next_taken);
    if (!wait_until(state_->ready, lock, deadline, [&] { return slot.ready; })) return Outcome::kTimeout;
    taken = std::exchange(slot, {});
    // After an error there is no next one: the threads finish what they began and stop.
    state_->next_taken = taken.error ? state_->num_items : state_->next_taken + 1;
    if (taken.error) state_->stop.request_stop();
  }
  state_->slot_freed.notify_all();
  if (taken.error) std::rethrow_exception(taken.error);
  item = std::move(taken.item);
  return Outcome::kItem;
}

}  // namespace lockstep::data
