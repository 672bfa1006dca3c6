#include "lockstep/comm/shm/shm.h"

#include <mutex>

#include "lockstep/base/error.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/gradient_table.h"
#include "lockstep/comm/shm/messages.h"
#include "lockstep/comm/shm/progress_engine.h"
#include "lockstep/comm/shm/shm_collective.h"
#include "lockstep/comm/shm/sync_op_queue.h"

namespace lockstep::comm::shm {
namespace {

using base::Deadline;

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(const ShmOptions& options)
      : store_(options.store),
        timeout_(options.timeout),
        control_blocks_(ControlBlocks::connect(options.local_peers, *store_, options.members, options.rank,
                                               Deadline::in(timeout_))) {
    for (int peer = 0; peer < control_blocks_->size(); ++peer)
      peer_messages_.push_back(std::make_unique<PeerMessages>(*control_blocks_, peer));
  }
  ~ShmTransport() override {
    abort(std::make_exception_ptr(base::PeerLostError(base::Cause::kPeerUnreachable, "shm", control_blocks_->rank(),
                                                      control_blocks_->rank(), "the transport was closed")));
  }

  std::string_view name() const override { return "shm"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all = full_cpu_capabilities({at::kFloat, at::kBFloat16, at::kHalf});
    return all;
  }

  PendingPtr start(const Collective& op) override {
    if (aborted_.load()) {
      auto pending = std::make_shared<Pending>();
      pending->finish(cause_);
      return pending;
    }
    if (op.kind == CollectiveKind::kSend) return send(op);
    if (op.kind == CollectiveKind::kRecv) return receive(op);
    const std::uint32_t number = reserve_sequence_numbers(op);
    return add(std::make_shared<ShmCollective>(op, *control_blocks_, number), number);
  }

  PendingPtr start_checked(const Collective& op, const SignatureView& signature) override {
    if (aborted_.load() || op.kind == CollectiveKind::kSend || op.kind == CollectiveKind::kRecv) return nullptr;
    const std::uint32_t number = reserve_sequence_numbers(op);
    const auto operation = std::make_shared<ShmCollective>(op, *control_blocks_, number, signature);
    if (collectives_.try_complete(*operation) && !operation->needs_sub_operations())
      return {PendingPtr(), completed_pending_.get()};  // owned by this transport, so no reference is counted
    return add(operation, number);
  }

  std::unique_ptr<PeerMemoryReducer> make_in_place_reducer(const std::vector<at::Tensor>& parts) override {
    auto store = std::make_shared<job::PrefixStore>("parts/" + std::to_string(num_reducers_++), store_);
    return std::make_unique<GradientTable>(parts, collectives_,
                                           GradientTable::Options{.store = std::move(store), .timeout = timeout_});
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load()) return;
    cause_ = std::move(cause);
    aborted_.store(true);
    collectives_.abort(cause_);
    for (const auto& messages : peer_messages_) {
      messages->sends.abort(cause_);
      messages->receives.abort(cause_);
    }
  }

 private:
  /// Reserves a number for the operation and for each sub-operation that it may need.
  std::uint32_t reserve_sequence_numbers(const Collective& op) {
    return collectives_.reserve_numbers(1 + ShmCollective::num_sub_operations(op));
  }

  /// Queues the operation, followed by its sub-operations if it needs them.
  PendingPtr add(const std::shared_ptr<ShmCollective>& operation, std::uint32_t number) {
    operation->take_ownership();
    return collectives_.add([this, operation, number, done = std::uint32_t{0},
                             sub_operation = std::shared_ptr<ShmCollective>()](Deadline deadline) mutable {
      if (!operation->advance(deadline)) return false;
      for (; operation->needs_sub_operations() && done < ShmCollective::num_sub_operations(operation->op());
           ++done, sub_operation = nullptr) {
        if (!sub_operation) sub_operation = make_sub_operation(operation->op(), done, number + 1 + done);
        if (!sub_operation->advance(deadline)) return false;
      }
      return true;
    });
  }

  std::shared_ptr<ShmCollective> make_sub_operation(const Collective& op, std::uint32_t index, std::uint32_t number) {
    const Collective sub_operation = ShmCollective::sub_operation_of(op, index);
    auto operation = std::make_shared<ShmCollective>(sub_operation, *control_blocks_, number);
    operation->take_ownership();
    return operation;
  }

  struct PeerMessages {
    PeerMessages(const ControlBlocks& control_blocks, int peer)
        : sender(control_blocks, peer), receiver(control_blocks, peer) {}
    MessageSender sender;
    MessageReceiver receiver;
    ProgressEngine sends{"shm"};
    ProgressEngine receives{"shm"};
  };

  PendingPtr send(const Collective& op) {
    PeerMessages& messages = *peer_messages_[static_cast<std::size_t>(op.root)];
    return messages.sends.add(
        [this, &messages, tensor = op.input, peer = op.root, posted = false](Deadline deadline) mutable {
          if (!std::exchange(posted, true)) messages.sender.post(tensor);
          if (!control_blocks_->wait(peer, messages.sender.received(), messages.sender.number(), deadline))
            return false;
          messages.sender.release();
          return true;
        });
  }

  PendingPtr receive(const Collective& op) {
    PeerMessages& messages = *peer_messages_[static_cast<std::size_t>(op.root)];
    return messages.receives.add([this, &messages, tensor = op.output, peer = op.root](Deadline deadline) {
      if (!control_blocks_->wait(peer, messages.receiver.sent(), messages.receiver.next(), deadline)) return false;
      if (!messages.receiver.receive_into(tensor))
        throw std::runtime_error("received a message of another size; expected " + std::to_string(tensor.nbytes()) +
                                 " bytes");
      return true;
    });
  }

  const std::shared_ptr<job::Store> store_;
  const std::chrono::milliseconds timeout_;
  const std::unique_ptr<ControlBlocks> control_blocks_;
  int num_reducers_ = 0;
  const PendingPtr completed_pending_ = make_finished_pending();
  SyncOpQueue collectives_{"shm", *control_blocks_};
  std::vector<std::unique_ptr<PeerMessages>> peer_messages_;
  base::Mutex abort_mutex_;  // held while the members below change; cause_ is read only after aborted_ is true
  base::Atomic<bool> aborted_{false};
  std::exception_ptr cause_;
};

}  // namespace

std::shared_ptr<Transport> make_shm_transport(const ShmOptions& options) {
  return std::make_shared<ShmTransport>(options);
}

}  // namespace lockstep::comm::shm
