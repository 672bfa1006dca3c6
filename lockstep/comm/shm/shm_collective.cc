#include "lockstep/comm/shm/shm_collective.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/arena/quarantine.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm::shm {
namespace {

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

}  // namespace

ShmCollective::ShmCollective(const Collective& op, const ControlBlocks& control_blocks, std::uint32_t number,
                             const SignatureView& signature)
    : SyncOp(control_blocks, number),
      op_(&op),
      signature_(signature),
      fits_inline_([&] {
        // The same on all ranks: it depends only on the size of one rank's part.
        const bool input_has_parts = op.kind == CollectiveKind::kScatter || op.kind == CollectiveKind::kAllToAll ||
                                     op.kind == CollectiveKind::kReduceScatter;
        const at::Tensor& part = input_has_parts ? op.output : op.input;
        const std::size_t factor = input_has_parts && op.kind != CollectiveKind::kAllToAll
                                       ? static_cast<std::size_t>(control_blocks.size())
                                       : 1;
        return !part.defined() ||
               part.nbytes() * factor <= (op.kind == CollectiveKind::kAllReduce ? kMaxInlineReduceBytes : kInlineBytes);
      }()),
      fits_counter_(signature.bytes && op.kind == CollectiveKind::kAllReduce &&
                    op.input.nbytes() <= sizeof(SharedCounter::data)) {}

ShmCollective::~ShmCollective() {
  if (!is_exposed() || fits_inline_)
    control_blocks_.arena().free(staged_);
  else if (!staged_ && op_->input.defined())
    arena::quarantine_tensor(op_->input);  // the operation was abandoned while peers may still write there
}

void ShmCollective::take_ownership() {
  owned_op_ = std::make_unique<const Collective>(*op_);
  op_ = owned_op_.get();
}

void ShmCollective::publish() {
  ControlBlock& own = control_blocks_.own();
  const std::size_t parity = number_ % 2;
  if (control_blocks_.rank() == 0) own.claims[parity].store(0, std::memory_order_relaxed);
  if (signature_.bytes) publish_signature(own);
  const bool from_root = op_->kind == CollectiveKind::kBroadcast || op_->kind == CollectiveKind::kScatter;
  if (!op_->input.defined() || (from_root && op_->root != control_blocks_.rank())) return;
  const void* data = op_->input.const_data_ptr();
  if (fits_counter_) return copy(own.published[parity].data, data, op_->input.nbytes());
  if (fits_inline_) return copy(inline_data_of(own), data, op_->input.nbytes());
  arena::Arena& arena = control_blocks_.arena();
  if (!arena.contains(data)) {
    if (num_sub_operations(*op_) > 0) {
      own.offset[parity] = kOutsideArena;
      return;
    }
    staged_ = arena.allocate(op_->input.nbytes());
    std::memcpy(staged_, data, op_->input.nbytes());
    data = staged_;
  }
  own.offset[parity] = arena.offset_of(data);
}

void ShmCollective::publish_signature(ControlBlock& own) const {
  // At the beginning of the element, where an all_gather of the signature would put it: other ranks may have started a
  // call whose signature is compared in that way.
  std::memcpy(own.inline_data[number_ % 2], signature_.bytes, signature_.size);
  own.published[number_ % 2].key = signature_.hash;
}

/// Compares the hashes, which are in the cache lines of the counters, and copies the signatures only if they differ.
bool ShmCollective::signatures_match() {
  bool match = true;
  for (int member = 0; member < control_blocks_.size(); ++member)
    match = match && control_blocks_.of(member).published[number_ % 2].key == signature_.hash;
  if (match) return true;
  signature_.all_signatures->resize(static_cast<std::size_t>(control_blocks_.size()) * signature_.size);
  for (int member = 0; member < control_blocks_.size(); ++member)
    std::memcpy(signature_.all_signatures->data() + static_cast<std::size_t>(member) * signature_.size,
                control_blocks_.of(member).inline_data[number_ % 2], signature_.size);
  return false;
}

char* ShmCollective::inline_data_of(const ControlBlock& control_block) const {
  return const_cast<char*>(control_block.inline_data[number_ % 2]) + (signature_.bytes ? kMaxSignatureBytes : 0);
}

/// The published data of `member`. Large data may be written to.
char* ShmCollective::data_of(int member) const {
  ControlBlock& control_block = control_blocks_.of(member);
  if (fits_counter_) return control_block.published[number_ % 2].data;
  return fits_inline_ ? inline_data_of(control_block)
                      : control_blocks_.arena_of(member) + control_block.offset[number_ % 2];
}

void ShmCollective::copy(void* to, const void* from, std::size_t bytes) const {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

void ShmCollective::compute() {
  signatures_differ_ = signature_.bytes && !signatures_match();
  if (signatures_differ_) return;
  const int rank = control_blocks_.rank();
  const bool at_root = op_->root == rank;
  char* output = op_->output.defined() ? static_cast<char*>(op_->output.mutable_data_ptr()) : nullptr;
  const auto all = static_cast<std::size_t>(control_blocks_.size());
  switch (op_->kind) {
    case CollectiveKind::kAllReduce:
      needs_sub_operations_ = num_sub_operations(*op_) > 0 && is_any_outside_arena();
      if (needs_sub_operations_) return;
      return fits_inline_ ? reduce_into(0, static_cast<std::size_t>(op_->input.numel()), false) : reduce_chunks();
    case CollectiveKind::kReduce:
      if (!fits_inline_) return reduce_chunks();
      if (at_root) reduce_into(0, static_cast<std::size_t>(op_->input.numel()), false);
      return;
    case CollectiveKind::kReduceScatter: {
      const auto count = static_cast<std::size_t>(op_->output.numel());
      return reduce_into(count * static_cast<std::size_t>(rank), count, false);
    }
    case CollectiveKind::kBroadcast:
      if (!at_root) copy(output, data_of(op_->root), op_->input.nbytes());
      return;
    case CollectiveKind::kScatter:
      return copy(output, data_of(op_->root) + op_->output.nbytes() * static_cast<std::size_t>(rank),
                  op_->output.nbytes());
    case CollectiveKind::kGather:
      if (!at_root) return;
      [[fallthrough]];
    case CollectiveKind::kAllGather:
      for (std::size_t m = 0; m < all; ++m)
        copy(output + m * op_->input.nbytes(), data_of(static_cast<int>(m)), op_->input.nbytes());
      return;
    case CollectiveKind::kAllToAll: {
      const std::size_t part = op_->input.nbytes() / all;
      for (std::size_t m = 0; m < all; ++m)
        copy(output + m * part, data_of(static_cast<int>(m)) + static_cast<std::size_t>(rank) * part, part);
      return;
    }
    case CollectiveKind::kBarrier:
    case CollectiveKind::kSend:
    case CollectiveKind::kRecv: return;
  }
}

std::uint32_t ShmCollective::num_sub_operations(const Collective& op) {
  if (op.kind != CollectiveKind::kAllReduce || op.input.nbytes() <= 2 * kMaxSubOperationBytes) return 0;
  return static_cast<std::uint32_t>((op.input.nbytes() + 2 * kMaxSubOperationBytes - 1) / (2 * kMaxSubOperationBytes) *
                                    2);
}

Collective ShmCollective::sub_operation_of(const Collective& op, std::uint32_t index) {
  const std::int64_t count = op.input.numel(), num_chunks = num_sub_operations(op);
  const std::int64_t first = count * index / num_chunks, end = count * (index + 1) / num_chunks;
  Collective sub_operation = op;
  sub_operation.input = sub_operation.output = op.input.view({-1}).narrow(0, first, end - first);
  return sub_operation;
}

bool ShmCollective::is_any_outside_arena() const {
  for (int member = 0; member < control_blocks_.size(); ++member)
    if (control_blocks_.of(member).offset[number_ % 2] == kOutsideArena) return true;
  return false;
}

/// Each rank first claims the chunks of its own share, which its cache holds from the last operation, then the chunks
/// that no other rank has claimed.
void ShmCollective::reduce_own_chunks_first() {
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

void ShmCollective::reduce_chunks() {
  if (op_->input.nbytes() <= kMaxChunks * kMaxChunkBytes) return reduce_own_chunks_first();
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

/// Reduces elements [first, first + count) of all inputs. With `in_place` the result goes to the data of all ranks (or
/// of the root), otherwise to this rank's output.
void ShmCollective::reduce_into(std::size_t first, std::size_t count, bool in_place) {
  const std::size_t offset = first * op_->input.element_size();
  c10::SmallVector<const void*, 16> inputs;
  c10::SmallVector<void*, 16> outputs;
  for (int member = 0; member < control_blocks_.size(); ++member) {
    char* data = data_of(member) + offset;
    inputs.push_back(data);
    if (in_place && (op_->kind == CollectiveKind::kAllReduce || member == op_->root)) outputs.push_back(data);
  }
  if (!in_place) outputs.push_back(op_->output.mutable_data_ptr());
  reduce({.dtype = op_->input.scalar_type(),
          .op = op_->op,
          .inputs = inputs.data(),
          .num_inputs = inputs.size(),
          .outputs = outputs.data(),
          .num_outputs = outputs.size(),
          .count = count,
          .divisor = op_->op == ReduceOp::kMean ? control_blocks_.size() : 1});
}

void ShmCollective::complete() {
  if (!staged_) return;
  if (op_->kind == CollectiveKind::kAllReduce ||
      (op_->kind == CollectiveKind::kReduce && op_->root == control_blocks_.rank()))
    std::memcpy(op_->output.mutable_data_ptr(), staged_, op_->output.nbytes());
  control_blocks_.arena().free(std::exchange(staged_, nullptr));
}

}  // namespace lockstep::comm::shm
