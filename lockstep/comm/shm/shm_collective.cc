#include "lockstep/comm/shm/shm_collective.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/arena/quarantine.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm {
namespace {

constexpr std::size_t kChunkBytes = 512 << 10;  // claimed at once; 64 KiB to 4 MiB differ by 7 %
constexpr std::size_t kPieceBytes = 1024;       // no smaller piece is worth another rank's look at the claims
constexpr std::size_t kCopiedSum =
    512;  // beyond it a sum in place, with two meetings, moves fewer cache lines between cores
constexpr std::size_t kMaxPieces = 64;                 // as many as a word of claims has bits
constexpr std::uint64_t kOutside = ~std::uint64_t{0};  // an offset: of a tensor that is to go piece by piece
constexpr std::size_t kCachedBytes =
    256 << 10;  // a piece of an all_reduce outside the arena at most; no less than half of it

}  // namespace

Operation::Operation(const Collective& op, const Boards& boards, std::uint32_t number, const ComparedCall& call)
    : Meeting(boards, number),
      op_(&op),
      call_(call),
      small_([&] {
        // The same on all ranks: the size of one rank's part tells the others.
        const bool parts_of_input =
            op.kind == Kind::kScatter || op.kind == Kind::kAllToAll || op.kind == Kind::kReduceScatter;
        const at::Tensor& part = parts_of_input ? op.output : op.input;
        const std::size_t factor =
            parts_of_input && op.kind != Kind::kAllToAll ? static_cast<std::size_t>(boards.size()) : 1;
        return !part.defined() || part.nbytes() * factor <= (op.kind == Kind::kAllReduce ? kCopiedSum : kSlotBytes);
      }()),
      tiny_(call.bytes && op.kind == Kind::kAllReduce && op.input.nbytes() <= sizeof(Signal::data)) {}

Operation::~Operation() {
  if (!exposed() || small_)
    Arena::process().free(staged_);
  else if (!staged_ && op_->input.defined())
    keep_for_ever(op_->input);  // it was given up while others may still write there
}

void Operation::keep() {
  kept_ = std::make_unique<const Collective>(*op_);
  op_ = kept_.get();
}

void Operation::show() {
  Board& own = boards_.own();
  const std::size_t parity = number_ % 2;
  if (boards_.rank() == 0) own.claims[parity].store(0, std::memory_order_relaxed);
  if (call_.bytes) show_call(own);
  const bool from_root = op_->kind == Kind::kBroadcast || op_->kind == Kind::kScatter;
  if (!op_->input.defined() || (from_root && op_->root != boards_.rank())) return;
  const void* data = op_->input.const_data_ptr();
  if (tiny_) return copy(own.arrived[parity].data, data, op_->input.nbytes());
  if (small_) return copy(slot_of(own), data, op_->input.nbytes());
  Arena& arena = Arena::process();
  if (!arena.contains(data)) {
    if (num_pieces(*op_) > 0) {
      own.offset[parity] = kOutside;
      return;
    }
    staged_ = arena.allocate(op_->input.nbytes());
    std::memcpy(staged_, data, op_->input.nbytes());
    data = staged_;
  }
  own.offset[parity] = arena.offset_of(data);
}

void Operation::show_call(Board& own) const {
  // At the beginning of the slot, where an all_gather of it would put it: others may have called something that is
  // compared so.
  std::memcpy(own.slot[number_ % 2], call_.bytes, call_.size);
  own.arrived[number_ % 2].key = call_.key;
}

/// Looks at the keys alone as long as they agree: they came with the signals.
bool Operation::all_called_the_same() {
  bool same = true;
  for (int member = 0; member < boards_.size(); ++member)
    same = same && boards_.of(member).arrived[number_ % 2].key == call_.key;
  if (same) return true;
  call_.all->resize(static_cast<std::size_t>(boards_.size()) * call_.size);
  for (int member = 0; member < boards_.size(); ++member)
    std::memcpy(call_.all->data() + static_cast<std::size_t>(member) * call_.size, boards_.of(member).slot[number_ % 2],
                call_.size);
  return false;
}

char* Operation::slot_of(const Board& board) const {
  return const_cast<char*>(board.slot[number_ % 2]) + (call_.bytes ? kCallBytes : 0);
}

/// What `member` has shown; a large one may be written to.
char* Operation::data_of(int member) const {
  Board& board = boards_.of(member);
  if (tiny_) return board.arrived[number_ % 2].data;
  return small_ ? slot_of(board) : boards_.arena_of(member) + board.offset[number_ % 2];
}

void Operation::copy(void* to, const void* from, std::size_t bytes) const {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

void Operation::work() {
  differ_ = call_.bytes && !all_called_the_same();
  if (differ_) return;
  const int rank = boards_.rank();
  const bool at_root = op_->root == rank;
  char* output = op_->output.defined() ? static_cast<char*>(op_->output.mutable_data_ptr()) : nullptr;
  const auto all = static_cast<std::size_t>(boards_.size());
  switch (op_->kind) {
    case Kind::kAllReduce:
      piecemeal_ = num_pieces(*op_) > 0 && anybody_is_outside();
      if (piecemeal_) return;
      return small_ ? reduce_into(0, static_cast<std::size_t>(op_->input.numel()), false) : reduce_claimed();
    case Kind::kReduce:
      if (!small_) return reduce_claimed();
      if (at_root) reduce_into(0, static_cast<std::size_t>(op_->input.numel()), false);
      return;
    case Kind::kReduceScatter: {
      const auto count = static_cast<std::size_t>(op_->output.numel());
      return reduce_into(count * static_cast<std::size_t>(rank), count, false);
    }
    case Kind::kBroadcast:
      if (!at_root) copy(output, data_of(op_->root), op_->input.nbytes());
      return;
    case Kind::kScatter:
      return copy(output, data_of(op_->root) + op_->output.nbytes() * static_cast<std::size_t>(rank),
                  op_->output.nbytes());
    case Kind::kGather:
      if (!at_root) return;
      [[fallthrough]];
    case Kind::kAllGather:
      for (std::size_t m = 0; m < all; ++m)
        copy(output + m * op_->input.nbytes(), data_of(static_cast<int>(m)), op_->input.nbytes());
      return;
    case Kind::kAllToAll: {
      const std::size_t part = op_->input.nbytes() / all;
      for (std::size_t m = 0; m < all; ++m)
        copy(output + m * part, data_of(static_cast<int>(m)) + static_cast<std::size_t>(rank) * part, part);
      return;
    }
    case Kind::kBarrier:
    case Kind::kSend:
    case Kind::kRecv: return;
  }
}

std::uint32_t Operation::num_pieces(const Collective& op) {
  if (op.kind != Kind::kAllReduce || op.input.nbytes() <= 2 * kCachedBytes) return 0;
  return static_cast<std::uint32_t>((op.input.nbytes() + 2 * kCachedBytes - 1) / (2 * kCachedBytes) * 2);
}

Collective Operation::piece_of(const Collective& op, std::uint32_t piece) {
  const std::int64_t count = op.input.numel(), pieces = num_pieces(op);
  const std::int64_t first = count * piece / pieces, end = count * (piece + 1) / pieces;
  Collective part = op;
  part.input = part.output = op.input.view({-1}).narrow(0, first, end - first);
  return part;
}

bool Operation::anybody_is_outside() const {
  for (int member = 0; member < boards_.size(); ++member)
    if (boards_.of(member).offset[number_ % 2] == kOutside) return true;
  return false;
}

/// Pieces of which each rank does its own first, which its cache has from the last time, then those that nobody has
/// begun.
void Operation::reduce_pieces() {
  const std::size_t element = op_->input.element_size();
  const auto count = static_cast<std::size_t>(op_->input.numel());
  const auto ranks = static_cast<std::size_t>(boards_.size());
  const std::size_t share = (count * element + ranks - 1) / ranks;
  const std::size_t step =
      std::clamp((share + kPieceBytes - 1) / kPieceBytes * kPieceBytes, kPieceBytes, kChunkBytes) / element;
  const std::size_t pieces = (count + step - 1) / step;
  std::atomic<std::uint64_t>& claims = boards_.of(0).claims[number_ % 2];
  const std::size_t begin = pieces * static_cast<std::size_t>(boards_.rank()) / ranks;
  for (std::size_t i = 0; i < pieces; ++i) {
    const std::size_t piece = (begin + i) % pieces;
    const std::uint64_t bit = std::uint64_t{1} << piece;
    if ((claims.load(std::memory_order_relaxed) & bit) != 0 ||
        (claims.fetch_or(bit, std::memory_order_relaxed) & bit) != 0)
      continue;
    reduce_into(piece * step, std::min(step, count - piece * step), true);
  }
}

void Operation::reduce_claimed() {
  if (op_->input.nbytes() <= kMaxPieces * kChunkBytes) return reduce_pieces();
  const std::size_t element = op_->input.element_size();
  const auto count = static_cast<std::size_t>(op_->input.numel());
  const std::size_t step = kChunkBytes / element;
  std::atomic<std::uint64_t>& claims = boards_.of(0).claims[number_ % 2];
  for (;;) {
    const std::size_t first = claims.fetch_add(1, std::memory_order_relaxed) * step;
    if (first >= count) return;
    reduce_into(first, std::min(step, count - first), true);
  }
}

/// Elements [first, first + count) of all inputs: to where they came from on all ranks (or the root), else to this
/// rank's output.
void Operation::reduce_into(std::size_t first, std::size_t count, bool everywhere) {
  const std::size_t offset = first * op_->input.element_size();
  c10::SmallVector<const void*, 16> inputs;
  c10::SmallVector<void*, 16> outputs;
  for (int member = 0; member < boards_.size(); ++member) {
    char* data = data_of(member) + offset;
    inputs.push_back(data);
    if (everywhere && (op_->kind == Kind::kAllReduce || member == op_->root)) outputs.push_back(data);
  }
  if (!everywhere) outputs.push_back(op_->output.mutable_data_ptr());
  reduce({.dtype = op_->input.scalar_type(),
          .op = op_->op,
          .inputs = inputs.data(),
          .num_inputs = inputs.size(),
          .outputs = outputs.data(),
          .num_outputs = outputs.size(),
          .count = count,
          .divisor = op_->op == ReduceOp::kMean ? boards_.size() : 1});
}

void Operation::finish() {
  if (!staged_) return;
  if (op_->kind == Kind::kAllReduce || (op_->kind == Kind::kReduce && op_->root == boards_.rank()))
    std::memcpy(op_->output.mutable_data_ptr(), staged_, op_->output.nbytes());
  Arena::process().free(std::exchange(staged_, nullptr));
}

}  // namespace lockstep::comm
