// Worker threads that make numbered items ahead of time and return them in order.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <thread>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep::data {

/// Makes item number `number`. Checks `stop` between its steps and returns null if a stop is requested.
using ItemMaker = std::function<std::shared_ptr<void>(std::uint64_t number, const std::stop_token& stop)>;

/// Makes items 0 .. num_items-1 with one thread per element of `makers`, at most `window` items ahead of the next item
/// to be taken. Which thread makes which item depends on timing; the order in which next() returns the items does not.
class OrderedWorkers {
 public:
  /// Starts the threads. Throws SystemError if a thread cannot be started, after stopping those that were.
  /// `stop_timeout` bounds the destructor.
  OrderedWorkers(std::uint64_t num_items, std::vector<ItemMaker> makers, std::uint64_t window,
                 std::chrono::milliseconds stop_timeout);
  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  /// Requests a stop and blocks until every thread has finished its current step and ended, at most `stop_timeout`. A
  /// thread that is then still inside its maker is detached, with a warning; it owns everything that it uses.
  ~OrderedWorkers();

  /// Blocks until the next item is ready and returns it; null at `deadline` and after the last item. Rethrows the
  /// maker's exception when the failed item is next; every later call returns null. Must be called by one thread only.
  std::shared_ptr<void> next(base::Deadline deadline);

 private:
  struct State;

  void stop(base::Deadline deadline);

  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
  std::chrono::milliseconds stop_timeout_;
};

}  // namespace lockstep::data
