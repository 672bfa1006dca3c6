#include "lockstep/comm/shm/shm.h"

#include <atomic>
#include <deque>
#include <map>
#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/gradient_table.h"
#include "lockstep/comm/shm/messages.h"
#include "lockstep/comm/shm/shm_collective.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

constexpr auto kSlice =
    std::chrono::milliseconds(20);  // of waiting, before a look at abort() and at whether the others live

/// Work that is done in order, by whoever waits for any of it.
class Queue {
 public:
  /// Something that advances until `deadline`; true when it is finished.
  using Step = std::function<bool(Deadline)>;

  class Item final : public Pending {
   public:
    Item(Queue& queue, Step step) : queue_(queue), step_(std::move(step)) {}
    bool done() override { return is_finished() || queue_.advance(*this, Deadline::in(std::chrono::milliseconds(0))); }
    bool wait_until(Deadline deadline) override {
      while (!is_finished() && !deadline.expired()) queue_.advance(*this, earlier(deadline, Deadline::in(kSlice)));
      return is_finished();
    }
    bool over() const { return is_finished(); }

   private:
    friend class Queue;
    Queue& queue_;
    Step step_;
  };

  PendingPtr add(Step step) {
    auto item = std::make_shared<Item>(*this, std::move(step));
    const std::lock_guard lock(mutex_);
    if (ended_) {
      item->finish(ended_);  // while it was being made
      return item;
    }
    items_.push_back(item);
    advance_locked(*item, Deadline::in(std::chrono::milliseconds(0)));
    return item;
  }

  /// Does it at once if nothing comes before it and the others come while this spins. Otherwise it has begun, or not,
  /// and is for add().
  bool try_now(Meeting& meeting) {
    const std::lock_guard lock(mutex_);
    try {
      return items_.empty() && meeting.advance_quickly();
    } catch (const ArenaFull&) {
      return false;  // it has not begun; add() says why
    }
  }

  /// Ends what is left, and what comes later; it is not advanced any more.
  void end(const std::exception_ptr& cause) {
    const std::lock_guard lock(mutex_);
    ended_ = cause;
    for (const auto& item : items_) item->finish(cause);
    items_.clear();
  }

 private:
  bool advance(const Item& until, Deadline deadline) {
    const std::lock_guard lock(mutex_);
    return until.over() || advance_locked(until, deadline);
  }

  bool advance_locked(const Item& until, Deadline deadline) {
    while (!items_.empty() && !until.over()) {
      Item& first = *items_.front();
      try {
        if (!first.step_(deadline)) return false;
        first.finish();
      } catch (const ArenaFull& full) {
        first.finish(std::make_exception_ptr(base::CommError(base::Cause::kResource, "shm", -1, -1, full.what())));
      } catch (...) {
        first.finish(std::current_exception());
      }
      first.step_ = nullptr;
      items_.pop_front();
    }
    return until.over();
  }

  std::mutex mutex_;  // guards items_ and ended_; held for a slice of waiting at most
  std::deque<std::shared_ptr<Item>> items_;
  std::exception_ptr ended_;
};

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(const ShmOptions& options)
      : store_(options.store),
        timeout_(options.timeout),
        boards_(Boards::meet(options.neighbours, *store_, options.members, options.rank, Deadline::in(timeout_))) {
    for (int peer = 0; peer < boards_->size(); ++peer) pairs_.push_back(std::make_unique<Pair>(*boards_, peer));
  }
  ~ShmTransport() override {
    abort(std::make_exception_ptr(base::PeerLost(base::Cause::kPeerUnreachable, "shm", boards_->rank(), boards_->rank(),
                                                 "the transport was closed")));
  }

  std::string_view name() const override { return "shm"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all = everything_on_cpu({at::kFloat, at::kBFloat16, at::kHalf});
    return all;
  }

  PendingPtr start(const Collective& op) override {
    if (aborted_.load()) {
      auto pending = std::make_shared<Pending>();
      pending->finish(cause_);
      return pending;
    }
    if (op.kind == Kind::kSend) return send(op);
    if (op.kind == Kind::kRecv) return receive(op);
    const std::uint32_t number = reserve_numbers(op);
    return add(std::make_shared<Operation>(op, *boards_, number), number);
  }

  PendingPtr start_compared(const Collective& op, const ComparedCall& call) override {
    if (aborted_.load() || op.kind == Kind::kSend || op.kind == Kind::kRecv) return nullptr;
    const std::uint32_t number = reserve_numbers(op);
    const auto operation = std::make_shared<Operation>(op, *boards_, number, call);
    if (collectives_.try_now(*operation) && !operation->piecemeal())
      return {PendingPtr(), done_.get()};  // owned by this transport: nothing to count
    return add(operation, number);
  }

  std::unique_ptr<InPlaceReducer> make_in_place_reducer(const std::vector<at::Tensor>& parts) override {
    auto store = std::make_shared<job::PrefixStore>("parts/" + std::to_string(num_reducers_++), store_);
    return std::make_unique<GradientTable>(parts, *boards_, std::move(store), timeout_,
                                           [this](const auto& make) { return meet(make); });
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load()) return;
    cause_ = std::move(cause);
    aborted_.store(true);
    // Whoever waits lets go of its queue within a slice.
    collectives_.end(cause_);
    for (const auto& pair : pairs_) {
      pair->sends.end(cause_);
      pair->receives.end(cause_);
    }
  }

 private:
  /// One, and as many more as an operation that goes piece by piece would need.
  std::uint32_t reserve_numbers(const Collective& op) {
    const std::uint32_t number = ++number_;
    number_ += Operation::num_pieces(op);
    return number;
  }

  /// The operation, and its pieces when it turns out to need them.
  PendingPtr add(const std::shared_ptr<Operation>& operation, std::uint32_t number) {
    operation->keep();
    return collectives_.add([this, operation, number, done = std::uint32_t{0},
                             piece = std::shared_ptr<Operation>()](Deadline deadline) mutable {
      if (!operation->advance(deadline)) return false;
      for (; operation->piecemeal() && done < Operation::num_pieces(operation->op()); ++done, piece = nullptr) {
        if (!piece) piece = make_piece(operation->op(), done, number + 1 + done);
        if (!piece->advance(deadline)) return false;
      }
      return true;
    });
  }

  std::shared_ptr<Operation> make_piece(const Collective& op, std::uint32_t piece, std::uint32_t number) {
    const Collective part = Operation::piece_of(op, piece);
    auto operation = std::make_shared<Operation>(part, *boards_, number);
    operation->keep();
    return operation;
  }

  PendingPtr meet(const std::function<std::shared_ptr<Meeting>(std::uint32_t number)>& make) {
    return collectives_.add([meeting = make(++number_)](Deadline deadline) { return meeting->advance(deadline); });
  }

  struct Pair {
    Pair(const Boards& boards, int peer) : outbox(boards, peer), inbox(boards, peer) {}
    Outbox outbox;
    Inbox inbox;
    Queue sends;
    Queue receives;
  };

  PendingPtr send(const Collective& op) {
    Pair& pair = *pairs_[static_cast<std::size_t>(op.root)];
    return pair.sends.add([this, &pair, tensor = op.input, peer = op.root, posted = false](Deadline deadline) mutable {
      if (!std::exchange(posted, true)) pair.outbox.post(tensor);
      if (!boards_->wait(peer, pair.outbox.taken(), pair.outbox.number(), deadline)) return false;
      pair.outbox.release();
      return true;
    });
  }

  PendingPtr receive(const Collective& op) {
    Pair& pair = *pairs_[static_cast<std::size_t>(op.root)];
    return pair.receives.add([this, &pair, tensor = op.output, peer = op.root](Deadline deadline) {
      if (!boards_->wait(peer, pair.inbox.sent(), pair.inbox.next(), deadline)) return false;
      if (!pair.inbox.take(tensor))
        throw std::runtime_error("a message of another size than " + std::to_string(tensor.nbytes()) + " bytes came");
      return true;
    });
  }

  const std::shared_ptr<job::Store> store_;
  const std::chrono::milliseconds timeout_;
  const std::unique_ptr<Boards> boards_;
  int num_reducers_ = 0;
  const PendingPtr done_ = finished();
  std::uint32_t number_ = 0;  // of collectives, the same on all ranks
  Queue collectives_;
  std::vector<std::unique_ptr<Pair>> pairs_;
  std::mutex abort_mutex_;  // guards the change of what follows
  std::atomic<bool> aborted_{false};
  std::exception_ptr cause_;
};

}  // namespace

std::shared_ptr<Transport> make_shm_transport(const ShmOptions& options) {
  return std::make_shared<ShmTransport>(options);
}

}  // namespace lockstep::comm
