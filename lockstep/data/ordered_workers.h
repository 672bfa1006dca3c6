// Threads that make things ahead of time, handed out in the order of their numbers.
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

/// Makes thing number `number`. Looks at `stop` between its parts and returns null when a stop is requested.
using ItemMaker = std::function<std::shared_ptr<void>(std::uint64_t number, const std::stop_token& stop)>;

/// Makes things 0 .. num_items-1, one thread for each of `makers`, at most `window` ahead of the one that is taken
/// next. Which thread makes which thing depends on timing; the order in which they are handed out does not.
class OrderedWorkers {
 public:
  /// Starts the threads. Throws SystemError when the system refuses one; then none is left. `patience` bounds the
  /// destructor.
  OrderedWorkers(std::uint64_t num_items, std::vector<ItemMaker> makers, std::uint64_t window,
                 std::chrono::milliseconds stop_timeout);
  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  /// Requests a stop and waits until every thread has seen it: for as long as a maker needs for one part, at most
  /// `patience`. A thread that is still inside its maker then is left behind, with a warning; it owns all that it uses.
  ~OrderedWorkers();

  enum class Outcome { kItem, kEnd, kTimeout };
  /// Waits for the next thing and puts it into `thing`. What its maker threw is thrown here, when its turn comes; after
  /// that the outcome is kEnd for ever. One thread.
  Outcome next(std::shared_ptr<void>& item, base::Deadline deadline);

 private:
  struct State;

  void stop(base::Deadline deadline);

  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
  std::chrono::milliseconds stop_timeout_;
};

}  // namespace lockstep::data
