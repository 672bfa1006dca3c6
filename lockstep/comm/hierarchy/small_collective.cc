#include "lockstep/comm/hierarchy/small_collective.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm {
namespace {

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

ShortOperation::ShortOperation(const Collective& op, const Boards& boards, std::uint32_t number, const HostPlan& plan,
                               int rank, Transport* leaders, Results& results)
    : op_(op), boards_(boards), number_(number), plan_(plan), rank_(rank), leaders_(leaders), results_(results) {}

bool ShortOperation::takes(const Collective& op) { return !op.input.defined() || op.input.nbytes() <= kSlotBytes; }

bool ShortOperation::advance(base::Deadline deadline) {
  const std::size_t parity = number_ % 2;
  if (phase_ == Phase::kShow) {
    show();
    boards_.advance(boards_.own().arrived[parity], number_);
    phase_ = boards_.rank() == 0 ? Phase::kCollect : Phase::kRead;
  }
  if (phase_ == Phase::kCollect) {
    if (!all_have_shown(deadline)) return false;
    cross();
    phase_ = Phase::kCross;
  }
  if (phase_ == Phase::kCross) {
    if (!crossing_->wait_until(deadline)) return false;
    if (const auto error = crossing_->error()) std::rethrow_exception(error);
    boards_.own().offset[parity] = Arena::process().offset_of(results_.data);
    boards_.advance(boards_.own().done, number_);
    deliver(static_cast<const char*>(results_.data));
    phase_ = Phase::kFinished;
  }
  if (phase_ == Phase::kRead) {
    if (!boards_.wait(0, boards_.of(0).done, number_, deadline)) return false;
    deliver(boards_.arena_of(0) + boards_.of(0).offset[parity]);
    phase_ = Phase::kFinished;
  }
  return true;
}

void ShortOperation::show() {
  if (!op_.input.defined() || (op_.kind == Kind::kBroadcast && op_.root != rank_)) return;
  copy(boards_.own().slot[number_ % 2], op_.input.const_data_ptr(), op_.input.nbytes());
}

bool ShortOperation::all_have_shown(base::Deadline deadline) {
  for (; next_ < boards_.size(); ++next_)
    if (!boards_.wait(next_, boards_.of(next_).arrived[number_ % 2], number_, deadline)) return false;
  return true;
}

/// At least one byte, so that something crosses when nothing is to be said but that all are here.
std::size_t ShortOperation::block_bytes() const {
  const std::size_t bytes = op_.input.defined() ? op_.input.nbytes() : 0;
  return std::max<std::size_t>(1, op_.kind == Kind::kAllGather ? bytes * plan_.largest : bytes);
}

void ShortOperation::cross() {
  const std::size_t bytes = block_bytes();
  const bool from_root = op_.kind == Kind::kBroadcast;
  const std::size_t needed = from_root ? bytes : bytes * plan_.hosts.size();
  if (results_.bytes < needed) {
    // Whoever has shown this operation's data has read the one before.
    Arena::process().free(results_.data);
    results_ = {Arena::process().allocate(needed), needed};
  }
  block_ = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
  blocks_ = at::from_blob(results_.data, {static_cast<std::int64_t>(needed)}, at::kByte);
  auto* block = static_cast<char*>(from_root ? results_.data : block_.mutable_data_ptr());
  c10::SmallVector<const char*, 16> slots;
  for (int local = 0; local < boards_.size(); ++local) slots.push_back(boards_.of(local).slot[number_ % 2]);
  if (reduces()) {
    reduce_into(block, slots, {0, static_cast<std::size_t>(op_.input.numel())}, 1);
  } else if (op_.kind == Kind::kAllGather) {
    std::memset(block, 0, bytes);
    for (std::size_t local = 0; local < slots.size(); ++local)
      copy(block + local * op_.input.nbytes(), slots[local], op_.input.nbytes());
  } else {
    *block = 0;
  }
  if (!from_root) {
    crossing_ = leaders_->start({.kind = Kind::kAllGather, .input = block_, .output = blocks_, .seq = number_});
    return;
  }
  const auto root = plan_.places[static_cast<std::size_t>(op_.root)];
  if (root.host == plan_.places[static_cast<std::size_t>(rank_)].host)
    copy(block, slots[static_cast<std::size_t>(root.local)], op_.input.nbytes());
  crossing_ = leaders_->start(
      {.kind = Kind::kBroadcast, .input = blocks_, .output = blocks_, .root = root.host, .seq = number_});
}

void ShortOperation::reduce_into(void* output, c10::ArrayRef<const char*> inputs, Slice slice, int divisor) const {
  c10::SmallVector<const void*, 16> parts;
  for (const char* input : inputs) parts.push_back(input + slice.first * op_.input.element_size());
  reduce({.dtype = op_.input.scalar_type(),
          .op = op_.op,
          .inputs = parts.data(),
          .num_inputs = parts.size(),
          .outputs = &output,
          .num_outputs = 1,
          .count = slice.count,
          .divisor = divisor});
}

/// Makes this rank's result of the blocks of all hosts.
void ShortOperation::deliver(const char* blocks) const {
  if (!op_.output.defined()) return;
  auto* output = static_cast<char*>(op_.output.mutable_data_ptr());
  const std::size_t bytes = block_bytes();
  if (op_.kind == Kind::kBroadcast) {
    if (op_.root != rank_) copy(output, blocks, op_.output.nbytes());
  } else if (op_.kind == Kind::kAllGather) {
    const std::size_t part = op_.input.nbytes();
    for (std::size_t member = 0; member < plan_.places.size(); ++member) {
      const auto place = plan_.places[member];
      copy(output + member * part,
           blocks + static_cast<std::size_t>(place.host) * bytes + static_cast<std::size_t>(place.local) * part, part);
    }
  } else if (reduces()) {
    c10::SmallVector<const char*, 16> hosts;
    for (std::size_t host = 0; host < plan_.hosts.size(); ++host) hosts.push_back(blocks + host * bytes);
    const auto count = static_cast<std::size_t>(op_.output.numel());
    const std::size_t first = op_.kind == Kind::kReduceScatter ? count * static_cast<std::size_t>(rank_) : 0;
    reduce_into(output, hosts, {first, count}, op_.op == ReduceOp::kMean ? static_cast<int>(plan_.places.size()) : 1);
  }
}

}  // namespace lockstep::comm
