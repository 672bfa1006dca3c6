#include "lockstep/comm/channel/channel.h"

#include <algorithm>
#include <utility>

#include "lockstep/comm/channel/forbid_collectives.h"

namespace lockstep::comm {
namespace {

using base::CommError;
using base::Deadline;

constexpr auto kFirstLook = std::chrono::milliseconds(200);
// Two that wait for each other know it when each has seen the other's beat move. Every look asks the store about every
// member.
constexpr auto kPauseForMember = std::chrono::milliseconds(20);
constexpr std::chrono::milliseconds kPauseOfSuspicion{50};
constexpr std::chrono::milliseconds kLongestPause{1000};
constexpr std::chrono::milliseconds kLongestPauseOfFew{400};
constexpr auto kSlice = std::chrono::milliseconds(100);  // in which news of a failure is heard

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    // Only the first line: what c10 and gloo throw carries stack traces.
    const std::string text = exception.what();
    return text.substr(0, text.find('\n'));
  }
}

/// Of a failure, by an exception, in this process.
std::atomic<bool> somebody_was_told{false};

/// Waits until it is done, the deadline, or until there is something to look at.
bool done_within(Pending& pending, Deadline deadline) {
  while (!pending.wait_until(earlier(deadline, Deadline::in(kSlice))))
    if (deadline.expired() || Watch::job_has_failed()) return false;
  return true;
}

}  // namespace

Channel::Channel(std::string name, std::vector<int> members, int rank, std::shared_ptr<Transport> transport,
                 std::shared_ptr<Watch> watch)
    : name_(std::move(name)),
      members_(std::move(members)),
      rank_(rank),
      transport_(std::move(transport)),
      watch_(std::move(watch)),
      count_(watch_->count_of(name_)),
      recorded_as_(page_.flight.add_channel(name_)) {}

Channel::~Channel() {
  if (!follower_) return;
  const bool unwinding = std::uncaught_exceptions() > 0;
  if (unwinding && !follower_->idle())
    transport_->abort(std::make_exception_ptr(
        base::PeerLost(base::Cause::kPeerUnreachable, name_, watch_->rank(), watch_->rank(),
                       "rank " + std::to_string(watch_->rank()) + " dropped " + name_ + " because of an error")));
  follower_->post([] {})->wait_until(Deadline::never());  // bounded: each of those before it is, as all waits here
  if (closed_ && !unwinding && !somebody_was_told) std::rethrow_exception(closed_);  // to std::terminate()
}

void Channel::begin(Collective& op, const at::Tensor& tensor) {
  base::FlightNote what{.kind = comm::name(op.kind), .name = op.name};
  if (tensor.defined()) {
    what.dtype = comm::name(tensor.scalar_type());
    what.bytes = tensor.nbytes();
  }
  op.record = begin(what);
  op.seq = what.seq;
}

std::uint64_t Channel::begin(base::FlightNote& what) {
  throw_if_closed();
  expect_host_part(what.kind);
  watch_->started(count_, ++seq_);
  what.channel = recorded_as_;
  what.seq = seq_;
  what.step = page_.steps.load(std::memory_order_relaxed);
  return page_.flight.begin(what);
}

void Channel::throw_if_closed() const {
  if (!is_closed_.load(std::memory_order_acquire)) return;
  std::exception_ptr closed;
  {
    const std::lock_guard lock(mutex_);
    closed = closed_;
  }
  if (!closed) return;
  somebody_was_told = true;
  std::rethrow_exception(closed);
}

/// False when it was closed before, by another error.
bool Channel::close(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  closed_ = error;
  is_closed_.store(true, std::memory_order_release);
  page_.flight.give_up(recorded_as_);
  return true;
}

PendingPtr Channel::start(const Collective& op) {
  throw_if_closed();
  return transport_->start(op);
}

PendingPtr Channel::start_compared(const Collective& op, const ComparedCall& call) {
  throw_if_closed();
  return transport_->start_compared(op, call);
}

void Channel::wait(Pending& pending, const Collective& op, const std::string& text) {
  wait_on_host(pending, op, text);
  const PendingPtr end = pending.on_device();
  if (!end) return;
  if (Lane::current()) return wait_on_host(*end, op, text);
  end->order();
  if (!follower_) follower_ = std::make_unique<Lane>();
  follower_->post([this, end, op, text] { wait_on_host(*end, op, text); });
}

void Channel::end_behind_gpu(std::uint64_t record) {
  if (Lane::current()) return page_.flight.end(record);  // which has waited for it
  follower_->post([this, record] {
    if (!is_closed_.load(std::memory_order_acquire)) page_.flight.end(record);
  });
}

void Channel::settle() {
  if (follower_)
    follower_->post([] {})->wait_until(Deadline::never());  // bounded: each of those before it is, as all waits here
  throw_if_closed();
}

void Channel::wait_on_host(Pending& pending, const Collective& op, const std::string& text) {
  const Waiting waiting{name_, op.seq, label(op), text, &members_, op.deadline};
  if (!pending.wait_until(earlier(op.deadline, Deadline::in(kFirstLook)))) {
    Watch::Looks looks;
    try {
      std::chrono::milliseconds pause = kFirstLook;
      const auto longest = std::clamp<std::chrono::milliseconds>(kPauseForMember * static_cast<int>(members_.size()),
                                                                 kLongestPauseOfFew, kLongestPause);
      do {
        if (op.deadline.expired()) watch_->timed_out(waiting, looks);
        watch_->look(waiting, looks);
        pause = std::exchange(looks.soon, false) ? kPauseOfSuspicion : std::min(pause * 5 / 4, longest);
      } while (!done_within(pending, earlier(op.deadline, Deadline::in(pause))));
    } catch (const CommError& error) {
      watch_->end(looks);
      fail(error);
    }
    watch_->end(looks);
  }
  if (const auto error = pending.error()) wire_failed(error, waiting);
}

void Channel::run(const Collective& op, const std::string& text) {
  const PendingPtr pending = start(op);
  wait(*pending, op, text);
}

void Channel::wire_failed(const std::exception_ptr& error, const Waiting& waiting) {
  std::string hint;
  try {
    std::rethrow_exception(error);
  } catch (const CommError& why) {
    fail(why);  // not the wire: the transport was aborted, and this is why
  } catch (const base::Error& said) {
    hint = said.hint();
  } catch (const std::exception&) {
    // What the wire says.
  }
  try {
    watch_->wire_failed(waiting, text_of(error), hint);
  } catch (const CommError& why) {
    fail(why);
  }
}

void Channel::abandon(const std::string& why) noexcept {
  const std::string text = "rank " + std::to_string(watch_->rank()) + " left " + name_ + " by an error: " + why;
  const auto error = std::make_exception_ptr(
      base::PeerLost(base::Cause::kPeerUnreachable, name_, watch_->rank(), watch_->rank(), text));
  if (!close(error)) return;
  somebody_was_told = true;  // of what this one leaves for
  watch_->abandon(name_, watch_->rank(), text);
  transport_->abort(error);
}

void Channel::fail(const CommError& error) {
  const std::exception_ptr thrown = std::current_exception();
  if (!follower_ || Lane::current() != follower_.get()) somebody_was_told = true;
  close(thrown);
  watch_->publish(error);
  if (error.cause() == base::Cause::kPeerUnreachable) {
    // Not a cause by itself, but members whose own connections live would wait for this rank.
    const std::string prefix = error.op() + ": ";
    const std::string what = error.what();
    watch_->abandon(name_, error.peer(), what.starts_with(prefix) ? what.substr(prefix.size()) : what);
  }
  transport_->abort(thrown);
  throw;
}

}  // namespace lockstep::comm
