#include "lockstep/comm/channel/serial_executor.h"

#include "lockstep/base/deadline.h"
#include "lockstep/base/thread.h"

namespace lockstep::comm::channel {
namespace {

thread_local const SerialExecutor* current_executor = nullptr;

}  // namespace

const SerialExecutor* SerialExecutor::current() { return current_executor; }

SerialExecutor::~SerialExecutor() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();  // bounded: every task has a deadline, and Group aborts its transport before
}

PendingPtr SerialExecutor::post(std::function<void()> task) {
  auto pending = std::make_shared<Pending>();
  const std::lock_guard lock(mutex_);
  unfinished_.fetch_add(1, std::memory_order_relaxed);
  queue_.push_back({std::move(task), pending});
  if (!thread_.joinable()) thread_ = base::start_thread([this] { run_loop(); });
  changed_.notify_all();
  return pending;
}

void SerialExecutor::run_loop() {
  base::name_own_thread("exec");
  current_executor = this;
  std::unique_lock lock(mutex_);
  for (;;) {
    // bounded: the destructor sets stop_
    base::wait_until(changed_, lock, base::Deadline::never(), [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task item = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      item.task();
    } catch (...) {
      error = std::current_exception();
    }
    item.task = nullptr;
    lock.lock();
    unfinished_.fetch_sub(1, std::memory_order_release);
    item.pending->finish(error);
  }
}

}  // namespace lockstep::comm::channel
