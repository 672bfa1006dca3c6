#include "lockstep/comm/channel/channel.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "lockstep/base/timeouts.h"
#include "lockstep/comm/channel/interrupt.h"
#include "lockstep/comm/interface/captured_step.h"

namespace lockstep::comm::channel {
namespace {

using base::CommError;
using base::Deadline;

// A rank in a deadlock detects it after it has read two different beats of the other rank. Every poll sends a store
// request for every member, so the interval grows with their number.
constexpr auto kPollIntervalPerMember = std::chrono::milliseconds(20);
constexpr std::chrono::milliseconds kSuspicionPollInterval{50};
constexpr std::chrono::milliseconds kMaxPollIntervalSmallGroup{400};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    // Only the first line: exceptions of c10 contain stack traces.
    const std::string text = exception.what();
    return text.substr(0, text.find('\n'));
  }
}

/// Whether an exception has reported a failure to the user of this process.
std::atomic<bool> failure_was_reported{false};

/// Returns true once `pending` is done. Returns false at the deadline or when the job has failed. Throws a CommError if
/// the user ends the wait.
bool done_within(Pending& pending, Deadline deadline, const WaitInfo& wait_info, int rank) {
  while (!pending.wait_until(earlier(deadline, Deadline::in(base::kFailureCheckInterval)))) {
    if (is_interrupted())
      throw CommError(base::Cause::kInterrupted, wait_info.label, rank, -1,
                      wait_info.label + ": interrupted on rank " + std::to_string(rank));
    if (deadline.expired() || DeadlockDetector::job_has_failed()) return false;
  }
  return true;
}

}  // namespace

Channel::Channel(std::string name, std::vector<int> members, int rank, std::shared_ptr<Transport> transport,
                 std::shared_ptr<DeadlockDetector> deadlock_detector)
    : name_(std::move(name)),
      members_(std::move(members)),
      rank_(rank),
      transport_(std::move(transport)),
      deadlock_detector_(std::move(deadlock_detector)),
      start_counter_(deadlock_detector_->start_counter(name_)),
      flight_channel_(page_.flight.add_channel(name_)) {}

Channel::~Channel() {
  if (!gpu_waiter_) return;
  if (std::uncaught_exceptions() > 0) {
    if (gpu_waiter_->is_idle()) return;
    transport_->abort(std::make_exception_ptr(base::PeerLostError(
        base::Cause::kPeerUnreachable, name_, deadlock_detector_->rank(), deadlock_detector_->rank(),
        "rank " + std::to_string(deadlock_detector_->rank()) + " destroyed group " + name_ + " because of an error")));
    wait_for_gpu();
    return;
  }
  try {
    close();
  } catch (...) {
    std::terminate();
  }
}

void Channel::close() {
  wait_for_gpu();
  if (closing_error_ && !failure_was_reported) throw_if_closed();
}

void Channel::wait_for_gpu() {
  if (gpu_waiter_)
    gpu_waiter_->post([] {})->wait_until(Deadline::never());  // bounded: each earlier task is, like all waits here
}

void Channel::begin(Collective& op, const at::Tensor& tensor) {
  base::telemetry::OperationStart what{.kind = comm::name(op.kind), .name = op.name};
  if (tensor.defined()) {
    what.dtype = comm::name(tensor.scalar_type());
    what.bytes = tensor.nbytes();
  }
  op.flight_id = begin(what);
  op.seq = what.seq;
}

std::uint64_t Channel::begin(base::telemetry::OperationStart& what) {
  throw_if_closed();
  check_collectives_allowed(what.kind);
  deadlock_detector_->record_start(start_counter_, ++seq_);
  what.channel = flight_channel_;
  what.seq = seq_;
  what.step = page_.steps.load(std::memory_order_relaxed);
  return page_.flight.begin(what);
}

void Channel::throw_if_closed() const {
  if (fork_guard_.is_copy_in_child())
    throw base::UsageError("a process that rank " + std::to_string(members_[static_cast<std::size_t>(rank_)]) +
                               " has made by fork() calls the group " + name_ + "; expected calls of the rank only",
                           "call groups and DistributedDataParallel in the rank itself");
  if (!is_closed_.load(std::memory_order_acquire)) return;
  std::exception_ptr closed;
  {
    const std::lock_guard lock(mutex_);
    closed = closing_error_;
  }
  if (!closed) return;
  failure_was_reported = true;
  std::rethrow_exception(closed);
}

/// Returns false if the channel was closed already.
bool Channel::close_with(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  if (closing_error_) return false;
  closing_error_ = error;
  is_closed_.store(true, std::memory_order_release);
  page_.flight.abandon(flight_channel_);
  return true;
}

PendingPtr Channel::start(const Collective& op) {
  throw_if_closed();
  return transport_->start(op);
}

PendingPtr Channel::start_checked(const Collective& op, const SignatureView& call) {
  throw_if_closed();
  return transport_->start_checked(op, call);
}

void Channel::wait(Pending& pending, const Collective& op, const std::string& text) {
  wait_on_host(pending, op, text);
  const PendingPtr end = pending.device_completion();
  if (!end) return;
  if (SerialExecutor::current()) return wait_on_host(*end, op, text);
  end->block_current_stream();
  if (!gpu_waiter_) gpu_waiter_ = std::make_unique<SerialExecutor>();
  gpu_waiter_->post([this, end, op, text] {
    const DeadlockDetector::DeviceThread thread;
    wait_on_host(*end, op, text);
  });
}

void Channel::end_after_gpu(std::uint64_t flight_id) {
  if (SerialExecutor::current()) {
    page_.flight.end(flight_id);  // wait() has waited for the GPU
    return;
  }
  gpu_waiter_->post([this, flight_id] {
    if (!is_closed_.load(std::memory_order_acquire)) page_.flight.end(flight_id);
  });
}

void Channel::synchronize() {
  wait_for_gpu();
  throw_if_closed();
}

void Channel::wait_on_host(Pending& pending, const Collective& op, const std::string& text) {
  const WaitInfo wait_info{.channel = name_,
                           .seq = op.seq,
                           .label = label(op),
                           .text = text,
                           .members = &members_,
                           .any_member = op.kind == CollectiveKind::kRecv && op.root == kAnySource,
                           .deadline = op.deadline,
                           .hint = op.hint};
  if (!pending.wait_until(earlier(op.deadline, Deadline::in(base::kFirstWaitPoll)))) {
    DeadlockDetector::PollState poll_state;
    try {
      std::chrono::milliseconds pause = base::kFirstWaitPoll;
      const auto longest =
          std::clamp<std::chrono::milliseconds>(kPollIntervalPerMember * static_cast<int>(members_.size()),
                                                kMaxPollIntervalSmallGroup, base::kMaxWaitPollInterval);
      do {
        if (op.deadline.expired()) deadlock_detector_->throw_timeout(wait_info, poll_state);
        deadlock_detector_->poll(wait_info, poll_state);
        pause = std::exchange(poll_state.poll_soon, false) ? kSuspicionPollInterval : std::min(pause * 5 / 4, longest);
      } while (!done_within(pending, earlier(op.deadline, Deadline::in(pause)), wait_info, deadlock_detector_->rank()));
    } catch (const CommError& error) {
      deadlock_detector_->end_wait(poll_state);
      fail(error);
    }
    deadlock_detector_->end_wait(poll_state);
  }
  if (const auto error = pending.error()) throw_transport_failure(error, wait_info);
}

void Channel::run(const Collective& op, const std::string& text) {
  const PendingPtr pending = start(op);
  wait(*pending, op, text);
}

void Channel::throw_transport_failure(const std::exception_ptr& error, const WaitInfo& wait_info) {
  std::string hint;
  try {
    std::rethrow_exception(error);
  } catch (const CommError& why) {
    fail(why);  // the connection did not fail: the transport was aborted with this error
  } catch (const base::Error& transport_error) {
    hint = transport_error.hint();
  } catch (const std::exception&) {
    // The transport's own text is reported below.
  }
  try {
    deadlock_detector_->throw_transport_failure(wait_info, text_of(error), hint);
  } catch (const CommError& why) {
    fail(why);
  }
}

void Channel::abandon(const std::string& why) noexcept {
  const std::string text =
      "rank " + std::to_string(deadlock_detector_->rank()) + " abandoned " + name_ + " because of an error: " + why;
  const auto error = std::make_exception_ptr(base::PeerLostError(
      base::Cause::kPeerUnreachable, name_, deadlock_detector_->rank(), deadlock_detector_->rank(), text));
  if (!close_with(error)) return;
  failure_was_reported = true;  // the error that makes this rank abandon the channel
  deadlock_detector_->abandon(name_, deadlock_detector_->rank(), text);
  transport_->abort(error);
}

void Channel::throw_failure(const CommError& error) {
  try {
    error.rethrow();
  } catch (const CommError& thrown) {
    fail(thrown);
  }
  std::terminate();  // never reached; GCC does not know that a virtual function cannot return
}

void Channel::fail(const CommError& error) {
  const std::exception_ptr thrown = std::current_exception();
  if (!gpu_waiter_ || SerialExecutor::current() != gpu_waiter_.get()) failure_was_reported = true;
  close_with(thrown);
  deadlock_detector_->publish_failure(error);
  if (error.cause() == base::Cause::kPeerUnreachable) {
    // Not the job's first cause, but members whose own connections still work would wait for this rank.
    const std::string prefix = error.op() + ": ";
    const std::string what = error.what();
    deadlock_detector_->abandon(name_, error.peer(), what.starts_with(prefix) ? what.substr(prefix.size()) : what);
  }
  transport_->abort(thrown);
  throw;
}

}  // namespace lockstep::comm::channel
