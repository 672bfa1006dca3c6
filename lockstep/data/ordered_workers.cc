#include "lockstep/data/ordered_workers.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/thread.h"

namespace lockstep::data {

// Shared with every thread, so that it outlives a detached thread.
struct OrderedWorkers::State {
  struct Slot {
    bool is_ready = false;
    std::shared_ptr<void> item;
    std::exception_ptr error;
  };

  State(std::uint64_t items, std::uint64_t window) : num_items(items), slots(window) {}

  void work(const ItemMaker& make);
  Slot& slot_of(std::uint64_t number) { return slots[number % slots.size()]; }
  // Requires the mutex. Returns whether a thread may start the next item.
  bool has_free_slot() const { return next_started < next_taken + slots.size(); }

  const std::uint64_t num_items;
  std::stop_source stop;

  std::mutex mutex;                     // guards all below
  std::condition_variable slot_freed;   // a slot was freed, or a stop was requested
  std::condition_variable slot_filled;  // a slot was filled, or a thread has ended
  std::vector<Slot> slots;
  std::uint64_t next_started = 0;
  std::uint64_t next_taken = 0;
  std::size_t num_running = 0;
};

void OrderedWorkers::State::work(const ItemMaker& make) {
  const auto token = stop.get_token();
  std::unique_lock lock(mutex);
  for (;;) {
    base::wait_until(slot_freed, lock, base::Deadline::never(),  // bounded: the owner's destructor requests a stop
                     [&] { return token.stop_requested() || next_started >= num_items || has_free_slot(); });
    if (token.stop_requested() || next_started >= num_items) break;
    const std::uint64_t number = next_started++;
    lock.unlock();
    Slot result{.is_ready = true, .item = nullptr, .error = nullptr};
    try {
      result.item = make(number, token);
    } catch (...) {
      result.error = std::current_exception();
    }
    lock.lock();
    slot_of(number) = std::move(result);
    slot_filled.notify_all();
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
      threads_.push_back(base::start_thread([state = state_, make = std::move(make)]() mutable {
        state->work(make);
        make = nullptr;  // destroy the dataset's copy before the thread counts as ended
        const std::lock_guard lock(state->mutex);
        --state->num_running;
        state->slot_filled.notify_all();
      }));
    }
  } catch (const base::Error& error) {
    {
      const std::lock_guard lock(state_->mutex);
      --state_->num_running;
    }
    const std::string which = std::to_string(threads_.size() + 1) + " of " + std::to_string(num_threads);
    stop(base::Deadline::in(stop_timeout_));
    throw base::Error(error.cause(), "loader thread " + which + ": " + error.what(), error.hint());
  }
}

OrderedWorkers::~OrderedWorkers() { stop(base::Deadline::in(stop_timeout_)); }

void OrderedWorkers::stop(base::Deadline deadline) {
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->stop.request_stop();
    state_->slot_freed.notify_all();
    ended = base::wait_until(state_->slot_filled, lock, deadline, [&] { return state_->num_running == 0; });
  }
  if (!ended)
    base::log_warning("a loader thread is still inside the dataset " + std::to_string(stop_timeout_.count()) +
                      " ms after a stop was requested; it is detached");
  for (auto& thread : threads_) {
    if (ended)
      thread.join();  // bounded: the thread has ended its work
    else
      thread.detach();
  }
}

std::shared_ptr<void> OrderedWorkers::next(base::Deadline deadline) {
  State::Slot taken;
  {
    std::unique_lock lock(state_->mutex);
    if (state_->next_taken >= state_->num_items) return nullptr;
    State::Slot& slot = state_->slot_of(state_->next_taken);
    if (!base::wait_until(state_->slot_filled, lock, deadline, [&] { return slot.is_ready; })) return nullptr;
    taken = std::exchange(slot, {});
    // No item follows an error: the threads finish their current items and stop.
    state_->next_taken = taken.error ? state_->num_items : state_->next_taken + 1;
    if (taken.error) state_->stop.request_stop();
  }
  state_->slot_freed.notify_all();
  if (taken.error) std::rethrow_exception(taken.error);
  return std::move(taken.item);
}

}  // namespace lockstep::data
