#include "lockstep/comm/shm/shm.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "lockstep/comm/arena/quarantine.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/gradient_table.h"
#include "lockstep/comm/shm/progress_engine.h"
#include "lockstep/comm/shm/reduce.h"
#include "lockstep/comm/shm/sync_op.h"

namespace lockstep::comm::shm {
namespace {

using base::Deadline;

// The largest chunk, which a rank claims at once. The speeds with sizes from 64 KiB to 4 MiB differ by 7 %.
constexpr std::size_t kMaxChunkBytes = 512 << 10;
// The smallest chunk. For a smaller one, a claim would take longer than the work that it saves.
constexpr std::size_t kMinChunkBytes = 1024;
// Beyond this size a reduction in place, which synchronizes twice, moves fewer cache lines between cores.
constexpr std::size_t kMaxInlineReduceBytes = 512;
constexpr std::size_t kMaxChunks = 64;  // the number of bits of a claims word
// The offset that a rank publishes for a tensor outside the arena whose operation must be split.
constexpr std::uint64_t kOutsideArena = ~std::uint64_t{0};
// The size of a sub-operation of an all_reduce outside the arena is at most this and at least half of it.
constexpr std::size_t kMaxSubOperationBytes = 256 << 10;

/// Small tensors are copied through the control blocks. Large tensors are read and written where they are, or in a copy
/// in the arena if they are outside it. An all_reduce of a large tensor outside the arena does no work itself: see
/// needs_sub_operations(). With a `signature` the ranks compare the hashes of their calls after they have published; if
/// the hashes differ, no data moves.
class ShmCollective final : public SyncOp {
 public:
  /// `op` must stay valid as long as this object exists, or until take_ownership().
  ShmCollective(const Collective& op, const ControlBlocks& control_blocks, std::uint32_t number,
                const SignatureView& signature = {})
      : SyncOp(control_blocks, number),
        op_(&op),
        signature_(signature),
        bytes_(op.input.defined() ? op.input.nbytes() : 0),
        fits_inline_([&] {
          // The same on all ranks: it depends only on the size of one rank's part.
          if (op.kind == CollectiveKind::kAllReduce) return bytes_ <= kMaxInlineReduceBytes;
          const auto ranks = static_cast<std::size_t>(control_blocks.size());
          if (op.kind == CollectiveKind::kScatter || op.kind == CollectiveKind::kReduceScatter)
            return op.output.nbytes() * ranks <= kInlineBytes;
          return bytes_ <= kInlineBytes;
        }()),
        fits_counter_(signature.bytes && op.kind == CollectiveKind::kAllReduce &&
                      bytes_ <= sizeof(SharedCounter::data)) {}

  ~ShmCollective() override {
    if (!is_exposed() || fits_inline_) return;
    // The operation was abandoned while peers may still write there.
    if (!staged_.release() && op_->input.defined()) arena::quarantine_tensor(op_->input);
  }
  ShmCollective(ShmCollective&&) = default;

  /// Copies `op`, so that the caller may destroy it.
  void take_ownership() {
    owned_op_ = std::make_unique<const Collective>(*op_);
    op_ = owned_op_.get();
  }

  const Collective& op() const { return *op_; }

  /// When the operation is finished: true if the tensor of some rank is outside the arena. Then nothing has been
  /// reduced, and each rank must continue with num_sub_operations() operations, sub_operation_of() with the numbers
  /// that follow. Their data stays in cache between the copies into and out of the arena.
  bool needs_sub_operations() const { return needs_sub_operations_; }
  /// 0 for an operation that is never split. Otherwise an even number, so that the next operation uses another element
  /// of the control blocks than the last sub-operation.
  static std::uint32_t num_sub_operations(const Collective& op) {
    if (op.kind != CollectiveKind::kAllReduce || op.input.nbytes() <= 2 * kMaxSubOperationBytes) return 0;
    return static_cast<std::uint32_t>((op.input.nbytes() + 2 * kMaxSubOperationBytes - 1) /
                                      (2 * kMaxSubOperationBytes) * 2);
  }

  static Collective sub_operation_of(const Collective& op, std::uint32_t index) {
    const std::int64_t count = op.input.numel(), num_chunks = num_sub_operations(op);
    const std::int64_t first = count * index / num_chunks, end = count * (index + 1) / num_chunks;
    Collective sub_operation = op;
    sub_operation.input = sub_operation.output = op.input.view({-1}).narrow(0, first, end - first);
    return sub_operation;
  }

 private:
  struct FreeInArena {
    arena::Arena* arena;
    void operator()(void* block) const noexcept { arena->free(block); }
  };

  void publish() override {
    ControlBlock& own = control_blocks_.own();
    const std::size_t parity = number_ % 2;
    if (control_blocks_.rank() == 0) own.claims[parity].store(0, std::memory_order_relaxed);
    if (signature_.bytes) publish_signature(own);
    const bool from_root = op_->kind == CollectiveKind::kBroadcast || op_->kind == CollectiveKind::kScatter;
    if (!op_->input.defined() || (from_root && op_->root != control_blocks_.rank())) return;
    const void* data = op_->input.const_data_ptr();
    if (fits_counter_) return copy(own.published[parity].data, data, bytes_);
    if (fits_inline_) return copy(inline_data_of(own), data, bytes_);
    arena::Arena& arena = control_blocks_.arena();
    if (!arena.contains(data)) {
      if (num_sub_operations(*op_) > 0) {
        own.offset[parity] = kOutsideArena;
        return;
      }
      staged_ = {arena.allocate(bytes_), FreeInArena{&arena}};
      data = std::memcpy(staged_.get(), data, bytes_);
    }
    own.offset[parity] = arena.offset_of(data);
  }

  void compute() override {
    signatures_differ_ = signature_.bytes && !signatures_match();
    if (signatures_differ_) return;
    if (fits_inline_ && op_->kind == CollectiveKind::kAllReduce)
      return reduce_into(0, static_cast<std::size_t>(op_->input.numel()), false);
    const int rank = control_blocks_.rank();
    const bool at_root = op_->root == rank;
    char* output = op_->output.defined() ? static_cast<char*>(op_->output.mutable_data_ptr()) : nullptr;
    const auto all = static_cast<std::size_t>(control_blocks_.size());
    switch (op_->kind) {
      case CollectiveKind::kAllReduce:
        needs_sub_operations_ = num_sub_operations(*op_) > 0 && is_any_outside_arena();
        return needs_sub_operations_ ? void() : reduce_chunks();
      case CollectiveKind::kReduce:
        if (!fits_inline_) return reduce_chunks();
        if (at_root) reduce_into(0, static_cast<std::size_t>(op_->input.numel()), false);
        return;
      case CollectiveKind::kReduceScatter: {
        const auto count = static_cast<std::size_t>(op_->output.numel());
        return reduce_into(count * static_cast<std::size_t>(rank), count, false);
      }
      case CollectiveKind::kBroadcast:
        if (!at_root) copy(output, data_of(op_->root), bytes_);
        return;
      case CollectiveKind::kScatter:
        return copy(output, data_of(op_->root) + op_->output.nbytes() * static_cast<std::size_t>(rank),
                    op_->output.nbytes());
      case CollectiveKind::kGather:
        if (!at_root) return;
        [[fallthrough]];
      case CollectiveKind::kAllGather:
        for (std::size_t m = 0; m < all; ++m) copy(output + m * bytes_, data_of(static_cast<int>(m)), bytes_);
        return;
      case CollectiveKind::kAllToAll: {
        const std::size_t part = bytes_ / all;
        for (std::size_t m = 0; m < all; ++m)
          copy(output + m * part, data_of(static_cast<int>(m)) + static_cast<std::size_t>(rank) * part, part);
        return;
      }
      case CollectiveKind::kBarrier:
      case CollectiveKind::kSend:
      case CollectiveKind::kRecv: return;
    }
  }

  void complete() override {
    if (!staged_) return;
    if (op_->kind == CollectiveKind::kAllReduce ||
        (op_->kind == CollectiveKind::kReduce && op_->root == control_blocks_.rank()))
      std::memcpy(op_->output.mutable_data_ptr(), staged_.get(), op_->output.nbytes());
    staged_.reset();
  }

  bool is_complete_after_compute() const override {
    return fits_inline_ || signatures_differ_ || needs_sub_operations_;
  }
  bool is_any_outside_arena() const {
    for (int member = 0; member < control_blocks_.size(); ++member)
      if (control_blocks_.of(member).offset[number_ % 2] == kOutsideArena) return true;
    return false;
  }

  /// Compares the hashes, which are in the cache lines of the counters, and copies the signatures only if they differ.
  bool signatures_match() {
    bool match = true;
    for (int member = 0; member < control_blocks_.size(); ++member)
      match = match && (member == control_blocks_.rank() ||
                        control_blocks_.of(member).published[number_ % 2].key == signature_.hash);
    if (match) return true;
    signature_.all_signatures->resize(static_cast<std::size_t>(control_blocks_.size()) * signature_.size);
    for (int member = 0; member < control_blocks_.size(); ++member)
      std::memcpy(signature_.all_signatures->data() + static_cast<std::size_t>(member) * signature_.size,
                  control_blocks_.of(member).inline_data[number_ % 2], signature_.size);
    return false;
  }

  void publish_signature(ControlBlock& own) const {
    // At the beginning of the element, where an all_gather of the signature would put it: other ranks may have started
    // a call whose signature is compared in that way.
    std::memcpy(own.inline_data[number_ % 2], signature_.bytes, signature_.size);
    own.published[number_ % 2].key = signature_.hash;
  }

  /// Each rank first claims the chunks of its own share, which its cache holds from the last operation, then the chunks
  /// that no other rank has claimed.
  void reduce_own_chunks_first() {
    const std::size_t element = op_->input.element_size();
    const auto count = static_cast<std::size_t>(op_->input.numel());
    const auto ranks = static_cast<std::size_t>(control_blocks_.size());
    const std::size_t share = (count * element + ranks - 1) / ranks;
    const std::size_t step =
        std::clamp((share + kMinChunkBytes - 1) / kMinChunkBytes * kMinChunkBytes, kMinChunkBytes, kMaxChunkBytes) /
        element;
    const std::size_t num_chunks = (count + step - 1) / step;
    base::Atomic<std::uint64_t>& claims = control_blocks_.of(0).claims[number_ % 2];
    const std::size_t begin = num_chunks * static_cast<std::size_t>(control_blocks_.rank()) / ranks;
    for (std::size_t i = 0; i < num_chunks; ++i) {
      const std::size_t chunk = (begin + i) % num_chunks;
      const std::uint64_t bit = std::uint64_t{1} << chunk;
      if ((claims.load(std::memory_order_relaxed) & bit) != 0 ||
          (claims.fetch_or(bit, std::memory_order_relaxed) & bit) != 0)
        continue;
      reduce_into(chunk * step, std::min(step, count - chunk * step), true);
    }
  }

  void reduce_chunks() {
    if (bytes_ <= kMaxChunks * kMaxChunkBytes) return reduce_own_chunks_first();
    const std::size_t element = op_->input.element_size();
    const auto count = static_cast<std::size_t>(op_->input.numel());
    const std::size_t step = kMaxChunkBytes / element;
    base::Atomic<std::uint64_t>& claims = control_blocks_.of(0).claims[number_ % 2];
    for (;;) {
      const std::size_t first = claims.fetch_add(1, std::memory_order_relaxed) * step;
      if (first >= count) return;
      reduce_into(first, std::min(step, count - first), true);
    }
  }

  /// Reduces elements [first, first + count) of all inputs. With `in_place` the result goes to the data of all ranks
  /// (or of the root), otherwise to this rank's output. Small data of this rank is then read from its tensor if that is
  /// also the output: a load of what it has just stored in the control block would wait until the cache line has come
  /// back from its last readers (25 ns of 265 with 8 bytes and two ranks).
  void reduce_into(std::size_t first, std::size_t count, bool in_place) {
    const std::size_t offset = first * op_->input.element_size();
    c10::SmallVector<const void*, 16> inputs;
    c10::SmallVector<void*, 16> outputs;
    char* own = !in_place && op_->kind != CollectiveKind::kReduceScatter
                    ? static_cast<char*>(op_->output.mutable_data_ptr())
                    : nullptr;
    for (int member = 0; member < control_blocks_.size(); ++member) {
      char* data = (own && member == control_blocks_.rank() ? own : data_of(member)) + offset;
      inputs.push_back(data);
      if (in_place && (op_->kind == CollectiveKind::kAllReduce || member == op_->root)) outputs.push_back(data);
    }
    if (!in_place) outputs.push_back(own ? own : op_->output.mutable_data_ptr());
    reduce({.dtype = op_->input.scalar_type(),
            .op = op_->op,
            .inputs = inputs.data(),
            .num_inputs = inputs.size(),
            .outputs = outputs.data(),
            .num_outputs = outputs.size(),
            .count = count,
            .divisor = op_->op == ReduceOp::kMean ? control_blocks_.size() : 1});
  }

  void copy(void* to, const void* from, std::size_t bytes) const {
    if (to != from && bytes > 0) std::memcpy(to, from, bytes);
  }

  char* inline_data_of(const ControlBlock& control_block) const {
    return const_cast<char*>(control_block.inline_data[number_ % 2]) + (signature_.bytes ? kMaxSignatureBytes : 0);
  }

  /// The published data of `member`. Large data may be written to.
  char* data_of(int member) const {
    ControlBlock& control_block = control_blocks_.of(member);
    if (fits_counter_) return control_block.published[number_ % 2].data;
    return fits_inline_ ? inline_data_of(control_block)
                        : control_blocks_.arena_of(member) + control_block.offset[number_ % 2];
  }

  std::unique_ptr<const Collective> owned_op_;
  const Collective* op_;
  const SignatureView signature_;
  const std::size_t bytes_;  // of the input; 0 without one
  const bool fits_inline_;
  const bool fits_counter_;  // small enough for SharedCounter::data
  bool signatures_differ_ = false;
  bool needs_sub_operations_ = false;
  std::unique_ptr<void, FreeInArena> staged_;  // copy in the arena if the tensor is outside it
};

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
    static const Capabilities all{.wire_dtypes = {at::kFloat, at::kBFloat16, at::kHalf, at::kChar}};
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
    ShmCollective operation(op, *control_blocks_, number, signature);
    if (collectives_.try_complete(operation) && !operation.needs_sub_operations())
      return {PendingPtr(), completed_pending_.get()};  // owned by this transport, so no reference is counted
    return add(std::make_shared<ShmCollective>(std::move(operation)), number);
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
