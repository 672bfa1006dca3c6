#include "lockstep/comm/shm/shm.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/gradient_table.h"
#include "lockstep/comm/shm/progress_engine.h"
#include "lockstep/comm/shm/shm_collective.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm::shm {
namespace {

using base::Deadline;

/// The messages to and from one peer, one at a time in each direction. One thread at a time sends, and one receives.
///
/// Memory ordering: the sender writes the data and MessageSlot::message, then advances `sent` (release). The receiver
/// loads `sent` (acquire) before it reads the message and the data, then advances its own `received` (release). The
/// sender loads `received` (acquire) before it writes the next message or frees the data. So there is one message in
/// flight per direction, and neither side needs a lock.
class PeerMessages {
 public:
  PeerMessages(const ControlBlocks& control_blocks, int peer) : control_blocks_(control_blocks), peer_(peer) {}

  /// Done when the peer has received the message.
  PendingPtr send(const at::Tensor& tensor) {
    return sends_.add([this, tensor, posted = false](Deadline deadline) mutable {
      if (!std::exchange(posted, true)) post(tensor);
      if (!control_blocks_.wait(peer_, slot_of_peer().received, num_posted_, deadline)) return false;
      control_blocks_.arena().free(std::exchange(copy_, nullptr));
      return true;
    });
  }

  PendingPtr receive(const at::Tensor& tensor) {
    return receives_.add([this, tensor](Deadline deadline) {
      if (!control_blocks_.wait(peer_, slot_of_peer().sent, num_received_ + 1, deadline)) return false;
      receive_into(tensor);
      return true;
    });
  }

  void abort(const std::exception_ptr& cause) noexcept {
    sends_.abort(cause);
    receives_.abort(cause);
  }

 private:
  const MessageSlot& slot_of_peer() const { return control_blocks_.message_slot(peer_, control_blocks_.rank()); }

  /// Publishes `tensor` to the peer; copies it first if it is not in the arena. Throws ArenaFull.
  void post(const at::Tensor& tensor) {
    arena::Arena& arena = control_blocks_.arena();
    const void* data = tensor.const_data_ptr();
    if (tensor.nbytes() > 0 && !arena.contains(data)) {
      copy_ = arena.allocate(tensor.nbytes());
      std::memcpy(copy_, data, tensor.nbytes());
      data = copy_;
    }
    MessageSlot& message_slot = control_blocks_.message_slot(control_blocks_.rank(), peer_);
    message_slot.message = {tensor.nbytes() > 0 ? arena.offset_of(data) : 0, tensor.nbytes()};
    control_blocks_.advance(message_slot.sent, ++num_posted_);
  }

  /// Copies the message that has arrived, and confirms it.
  void receive_into(const at::Tensor& tensor) {
    const ShmMessage& message = slot_of_peer().message;
    if (message.bytes != tensor.nbytes())
      throw std::runtime_error("received a message of another size; expected " + std::to_string(tensor.nbytes()) +
                               " bytes");
    if (message.bytes > 0)
      std::memcpy(tensor.mutable_data_ptr(), control_blocks_.arena_of(peer_) + message.offset, message.bytes);
    control_blocks_.advance(control_blocks_.message_slot(control_blocks_.rank(), peer_).received, ++num_received_);
  }

  const ControlBlocks& control_blocks_;
  const int peer_;
  std::uint32_t num_posted_ = 0;
  void* copy_ = nullptr;  // of the message in flight, if its tensor is not in the arena
  std::uint32_t num_received_ = 0;
  ProgressEngine sends_{"shm"};
  ProgressEngine receives_{"shm"};
};

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
  ~ShmTransport() override { abort(closed_error("shm", control_blocks_->rank())); }

  std::string_view name() const override { return "shm"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all{.wire_dtypes = {at::kFloat, at::kBFloat16, at::kHalf}};
    return all;
  }

  PendingPtr start(const Collective& op) override {
    if (aborted_.load()) {
      auto pending = std::make_shared<Pending>();
      pending->finish(cause_);
      return pending;
    }
    if (op.kind == CollectiveKind::kSend) return messages_of(op).send(op.input);
    if (op.kind == CollectiveKind::kRecv) return messages_of(op).receive(op.output);
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

  std::shared_ptr<GradientTable> make_gradient_table(const std::vector<at::Tensor>& gradients) override {
    auto store = std::make_shared<job::PrefixStore>("parts/" + std::to_string(num_tables_++), store_);
    return std::make_shared<GradientTable>(gradients, collectives_,
                                           GradientTable::Options{.store = std::move(store), .timeout = timeout_});
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(abort_mutex_);
    if (aborted_.load()) return;
    cause_ = std::move(cause);
    aborted_.store(true);
    collectives_.abort(cause_);
    for (const auto& messages : peer_messages_) messages->abort(cause_);
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

  PeerMessages& messages_of(const Collective& op) { return *peer_messages_[static_cast<std::size_t>(op.root)]; }

  const std::shared_ptr<job::Store> store_;
  const std::chrono::milliseconds timeout_;
  const std::unique_ptr<ControlBlocks> control_blocks_;
  int num_tables_ = 0;
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
