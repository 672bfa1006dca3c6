#include "lockstep/comm/tcp/tcp.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <list>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "lockstep/base/atomic.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/tcp/schedule.h"
#include "lockstep/comm/tcp/stream.h"

namespace lockstep::comm::tcp {

/// An operation that has started and has not ended.
struct Operation {
  Collective op;  // keeps the tensors alive
  PendingPtr pending;
  std::uint64_t number = 0;
  StepSchedule schedule;
  bool is_planned = false;
  std::size_t next_step = 0;
  std::vector<std::size_t> arriving;  // for each step, the transfers to this rank that have started and not ended
  std::size_t moving = 0;             // all transfers that have

  bool has_transfers_left() const {
    return !is_planned || std::any_of(schedule.steps.begin() + static_cast<std::ptrdiff_t>(next_step),
                                      schedule.steps.end(), [](const Step& step) { return !step.transfers.empty(); });
  }
  bool is_complete() const { return is_planned && moving == 0 && next_step == schedule.steps.size(); }
};

namespace {

using base::Deadline;

// In each call of wait_until(), a thread looks for bytes again and again for so long before it sleeps.
constexpr auto kPollTime = std::chrono::microseconds(100);
// A thread that waits while another one sends and receives tries this often to continue itself.
constexpr auto kTakeOverInterval = std::chrono::milliseconds(1);

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(const TcpOptions& options)
      : members_(options.members), rank_(options.rank), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) throw base::SystemError("eventfd", errno);
    for (PeerSockets& peer : connect_mesh(options)) {
      addresses_.push_back(address_of(peer[0]));
      for (base::Fd& socket : peer) streams_.emplace_back(std::move(socket));
    }
    errors_.resize(streams_.size());
    polled_.resize(streams_.size());
    entries_.resize(streams_.size() + 1);
    if (!options.has_thread) return;
    thread_ = base::start_thread_without_signals([this] {
      base::name_own_thread("tcp");
      while (!is_ending_) take_turn(-1, [] { return false; });  // bounded: wake() ends a turn
    });
  }

  ~TcpTransport() override {
    abort(closed_error("tcp", rank_));
    if (thread_.joinable()) thread_.join();   // bounded: abort() ends it
    const std::lock_guard lock(turn_mutex_);  // so does this wait: for a thread that still takes a turn
  }

  std::string_view name() const override { return "tcp"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all{};
    return all;
  }

  PendingPtr start(const Collective& op) override {
    auto operation = std::make_unique<Operation>();
    operation->op = op;
    if (thread_.joinable())
      operation->pending = std::make_shared<Pending>();
    else
      operation->pending = std::make_shared<OwnWaitersPending>(*this);
    PendingPtr pending = operation->pending;
    std::exception_ptr aborted;
    {
      const std::lock_guard lock(started_mutex_);
      aborted = aborted_;
      if (!aborted) started_.push_back(std::move(operation));
    }
    if (aborted)
      pending->finish(aborted);
    else if (!is_small(op) || !advance_at_once())
      wake();
    return pending;
  }

  void abort(std::exception_ptr cause) noexcept override {
    {
      const std::lock_guard lock(started_mutex_);
      if (aborted_) return;
      aborted_ = cause;
      is_ending_ = true;
    }
    wake();
    const std::lock_guard lock(mutex_);  // a turn stops after a transfer of 1 MiB or the reduction of a chunk
    take_started();
    end_all(cause);
  }

 private:
  static std::string address_of(const base::Fd& socket) {
    try {
      return socket ? to_string(base::net::peer_address(socket.get())) : "";
    } catch (const base::SystemError&) {  // the connection has ended already
      return "an unknown address";
    }
  }
  static bool is_message(const Operation& operation) {
    return operation.op.kind == CollectiveKind::kSend || operation.op.kind == CollectiveKind::kRecv;
  }

  /// Small enough that the caller's thread may send and receive it: switching to another one takes longer.
  static bool is_small(const Collective& op) {
    constexpr std::size_t kMostBytes = 64 << 10;
    return std::max(op.input.defined() ? op.input.nbytes() : 0, op.output.defined() ? op.output.nbytes() : 0) <=
           kMostBytes;
  }
  /// Starts what has been passed to start(), and transfers what can be transferred without blocking, on the caller's
  /// thread. Returns false if another thread is at it, or other operations are not complete.
  bool advance_at_once() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || !operations_.empty() || is_ending_) return false;
    take_started();
    constexpr int kMostTurns = 8;  // more only if another thread has started a large message meanwhile
    bool moved = true;
    for (int turn = 0; moved && turn < kMostTurns && !is_ending_; ++turn) moved = advance_all();
    bool is_outdated = moved;
    for (std::size_t i = 0; i < streams_.size(); ++i) is_outdated = is_outdated || (events_of(i) & ~polled_[i]) != 0;
    if (is_outdated) is_poll_outdated_ = true;
    lock.unlock();
    if (is_outdated) wake();
    return true;
  }
  short events_of(std::size_t stream) const { return errors_[stream] ? short{0} : streams_[stream].events(); }

  void wake() noexcept {
    if (is_polling_.exchange(false)) ::eventfd_write(wake_.get(), 1);
  }
  bool has_started() {
    const std::lock_guard lock(started_mutex_);
    return aborted_ || !started_.empty();
  }

  /// Transfers what can be transferred. Then, if not `is_enough()`, sleeps for `timeout_ms` at most until there is
  /// more, which it transfers, or until wake(). One thread at a time: the transport's, or the one that holds
  /// turn_mutex_.
  template <typename IsEnough>
  void take_turn(int timeout_ms, const IsEnough& is_enough) {
    {
      const std::lock_guard lock(mutex_);
      advance_until_blocked();
      if (is_enough()) return;
      entries_.back() = {wake_.get(), POLLIN, 0};
      for (std::size_t i = 0; i < streams_.size(); ++i) {
        polled_[i] = events_of(i);
        entries_[i] = {polled_[i] ? streams_[i].fd() : -1, polled_[i], 0};
      }
      is_poll_outdated_ = false;
    }
    is_polling_ = true;
    if (has_started() || is_poll_outdated_) {
      is_polling_ = false;
      return;
    }
    const int num_ready = ::poll(entries_.data(), entries_.size(), timeout_ms);
    is_polling_ = false;
    if (num_ready == 0) return;
    eventfd_t count;
    if (entries_.back().revents) ::eventfd_read(wake_.get(), &count);
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < streams_.size(); ++i)
      if (entries_[i].revents) streams_[i].set_ready(entries_[i].revents);
    advance_until_blocked();
  }

  void advance_until_blocked() {
    for (bool moved = true; moved && !is_ending_;) {
      take_started();
      moved = advance_all();
    }
  }

  /// Of an operation of a transport without a thread: whoever waits for it sends and receives.
  class OwnWaitersPending final : public Pending {
   public:
    explicit OwnWaitersPending(TcpTransport& transport) : transport_(transport) {}
    bool done() override { return wait_until(Deadline::in(std::chrono::milliseconds(0))); }
    bool wait_until(Deadline deadline) override {
      const Deadline end_of_polls = Deadline::in(kPollTime);
      for (bool is_last = false; !is_finished() && !is_last;) {
        is_last = deadline.expired();
        std::unique_lock turn(transport_.turn_mutex_, std::try_to_lock);
        if (turn && !transport_.is_ending_) {
          const bool looks = is_last || !end_of_polls.expired();
          transport_.take_turn(looks ? 0 : deadline.poll_ms(), [this] { return is_finished(); });
          turn.unlock();
          if (looks && !is_last && !is_finished()) base::yield_thread();
        } else if (!is_last) {
          if (turn) turn.unlock();
          sleep_until(earlier(deadline, Deadline::in(kTakeOverInterval)));
        }
      }
      return is_finished();
    }

   private:
    TcpTransport& transport_;
  };

  void take_started() {
    std::deque<std::unique_ptr<Operation>> started;
    {
      const std::lock_guard lock(started_mutex_);
      started.swap(started_);
    }
    for (auto& operation : started) begin(std::move(operation));
  }

  void begin(std::unique_ptr<Operation> operation) {
    Operation& begun = **operations_.insert(operations_.end(), std::move(operation));
    try {
      if (is_message(begun)) {
        begun.number = begun.op.seq;
        plan(begun, make_message(begun.op));
      } else {  // planned when it is its turn
        begun.number = ++num_collectives_;
        if (collectives_error_) std::rethrow_exception(collectives_error_);
      }
    } catch (...) {
      end(begun, std::current_exception());
    }
  }

  static void plan(Operation& operation, StepSchedule schedule) {
    operation.schedule = std::move(schedule);
    operation.arriving.resize(operation.schedule.steps.size());
    operation.is_planned = true;
  }

  /// A send ends with an answer, which is sent when the message has been received.
  static StepSchedule make_message(const Collective& op) {
    const bool sends = op.kind == CollectiveKind::kSend;
    StepSchedule schedule;
    schedule.steps.resize(sends ? 1 : 2);
    if (sends) {
      auto* data = static_cast<char*>(const_cast<void*>(op.input.const_data_ptr()));
      schedule.steps[0].transfers = {{op.root, true, data, op.input.nbytes()}, {op.root, false, nullptr, 0}};
    } else {
      auto* data = static_cast<char*>(op.output.mutable_data_ptr());
      schedule.steps[0].transfers = {{op.root, false, data, op.output.nbytes()}};
      schedule.steps[1].after = 0;
      schedule.steps[1].transfers = {{op.root, true, nullptr, 0}};
    }
    return schedule;
  }

  /// The stream of `operation` to `peer`.
  std::size_t stream_of(const Operation& operation, int peer) const {
    Purpose purpose = kCollectives;
    if (is_message(operation))
      purpose = (operation.op.kind == CollectiveKind::kSend) == (rank_ < peer) ? kMessagesUp : kMessagesDown;
    return kNumPurposes * static_cast<std::size_t>(peer) + purpose;
  }

  Scratch take_scratch() {
    if (scratch_.empty()) return {};
    Scratch taken = std::move(scratch_.back());
    scratch_.pop_back();
    return taken;
  }

  /// Starts what can start, and transfers what can be transferred without blocking. Returns whether anything changed.
  bool advance_all() {
    bool moved = start_steps();
    for (std::size_t i = 0; i < streams_.size() && !is_ending_; ++i) {
      if (errors_[i]) continue;
      try {
        moved = streams_[i].transfer([this](const Message& message, bool sent) { complete(message, sent); }) || moved;
      } catch (const base::Error&) {
        fail(i, std::current_exception());
        moved = true;
      }
    }
    return moved;
  }

  /// Starts the steps that can start. A collective sends and receives only after all earlier ones have started to send
  /// and receive everything, so that both ends of a connection expect the same order. Returns whether a step started.
  bool start_steps() {
    bool started = false, is_turn = true;
    for (auto at = operations_.begin(); at != operations_.end() && !is_ending_;) {
      Operation& operation = **at++;  // end() removes it
      try {
        started = start_steps(operation, is_turn || is_message(operation)) || started;
      } catch (...) {
        if (!is_message(operation)) {
          fail_collectives(std::current_exception());
          return true;
        }
        end(operation, std::current_exception());
        continue;
      }
      is_turn = is_turn && (is_message(operation) || !operation.has_transfers_left());
      if (operation.is_complete()) end(operation, nullptr);
    }
    return started;
  }

  bool start_steps(Operation& operation, bool may_transfer) {
    if (!operation.is_planned) {
      if (!may_transfer) return false;
      plan(operation,
           make_schedule(operation.op, rank_, static_cast<int>(members_.size()), [this] { return take_scratch(); }));
    }
    const std::size_t before = operation.next_step;
    while (operation.next_step < operation.schedule.steps.size()) {
      const Step& step = operation.schedule.steps[operation.next_step];
      if (step.after >= 0 && operation.arriving[static_cast<std::size_t>(step.after)] > 0) break;
      if (!may_transfer && !step.transfers.empty()) break;
      if (step.compute) step.compute();
      start_transfers(operation, step);
    }
    return operation.next_step > before;
  }

  void start_transfers(Operation& operation, const Step& step) {
    const std::size_t number = operation.next_step++;
    for (const Transfer& transfer : step.transfers) {
      const std::size_t stream = stream_of(operation, transfer.peer);
      if (errors_[stream]) std::rethrow_exception(errors_[stream]);
      const Message message{operation.number, transfer.data, transfer.bytes, &operation, number};
      ++operation.moving;
      if (transfer.sends) {
        streams_[stream].send(message);
      } else {
        ++operation.arriving[number];
        streams_[stream].receive(message);
      }
    }
  }

  void complete(const Message& message, bool sent) {
    Operation& operation = *message.operation;
    --operation.moving;
    if (!sent) --operation.arriving[message.step];
    base::telemetry::RankPage::this_process().alive_count.fetch_add(1, std::memory_order_relaxed);
    if (operation.is_complete()) end(operation, nullptr);
  }

  /// Ends an operation that no stream refers to.
  void end(Operation& operation, const std::exception_ptr& error) {
    if (operation.schedule.scratch.data) scratch_.push_back(std::move(operation.schedule.scratch));
    const PendingPtr pending = operation.pending;
    operations_.remove_if([&](const auto& each) { return each.get() == &operation; });  // and its tensors
    pending->finish(error);
  }

  /// The connection of a stream has ended.
  void fail(std::size_t stream, const std::exception_ptr& error) {
    const std::size_t peer = stream / kNumPurposes;
    const std::string text =
        "the connection to rank " + std::to_string(members_[peer]) + " at " + addresses_[peer] + " ended";
    try {
      std::rethrow_exception(error);
    } catch (const base::SystemError& failed) {
      errors_[stream] = std::make_exception_ptr(base::SystemError(text, failed.error_number(), failed.cause()));
    } catch (const base::Error& failed) {
      errors_[stream] = std::make_exception_ptr(base::Error(failed.cause(), text + ": " + failed.what()));
    }
    if (stream % kNumPurposes == kCollectives) return fail_collectives(errors_[stream]);
    std::set<Operation*> failed;  // one may have two messages
    streams_[stream].drop_all([&](const Message& message) { failed.insert(message.operation); });
    for (Operation* operation : failed) end(*operation, errors_[stream]);
  }

  void fail_collectives(const std::exception_ptr& error) {
    collectives_error_ = error;
    for (std::size_t i = 0; i < streams_.size(); i += kNumPurposes) {
      errors_[i] = error;
      streams_[i].drop_all([](const Message&) {});
    }
    std::vector<Operation*> failed;
    for (const auto& operation : operations_)
      if (!is_message(*operation)) failed.push_back(operation.get());
    for (Operation* operation : failed) end(*operation, error);
  }

  void end_all(const std::exception_ptr& cause) {
    for (MessageStream& stream : streams_) stream.drop_all([](const Message&) {});
    while (!operations_.empty()) end(*operations_.front(), cause);
  }

  const std::vector<int> members_;
  const int rank_;
  std::vector<std::string> addresses_;  // of the ranks, for messages
  const base::Fd wake_;
  std::mutex turn_mutex_;        // without a thread: held by the one that sends and receives
  std::vector<pollfd> entries_;  // of its poll()
  std::atomic<bool> is_polling_{false};
  std::atomic<bool> is_ending_{false};         // abort() waits for mutex_
  std::atomic<bool> is_poll_outdated_{false};  // nobody must poll for polled_ any longer

  std::mutex started_mutex_;  // guards the next two members
  std::deque<std::unique_ptr<Operation>> started_;
  std::exception_ptr aborted_;

  std::mutex mutex_;                        // held in a turn, except while it polls; guards the next members
  std::vector<MessageStream> streams_;      // by rank and purpose
  std::vector<std::exception_ptr> errors_;  // of the streams
  std::vector<short> polled_;               // what poll() waits for on each stream
  std::exception_ptr collectives_error_;
  std::uint64_t num_collectives_ = 0;
  std::list<std::unique_ptr<Operation>> operations_;  // in the order in which they were started
  std::vector<Scratch> scratch_;                      // not in use
  std::thread thread_;
};

}  // namespace

std::shared_ptr<Transport> make_tcp_transport(const TcpOptions& options) {
  return std::make_shared<TcpTransport>(options);
}

}  // namespace lockstep::comm::tcp
