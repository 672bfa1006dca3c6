#include "lockstep/comm/hierarchy/small_collective.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm::hierarchy {
namespace {

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

SmallCollective::SmallCollective(const Collective& op, const shm::ControlBlocks& control_blocks, std::uint32_t number,
                                 const HostPlan& plan, int rank, Transport* leaders, ResultBuffer& result_buffer)
    : op_(op),
      control_blocks_(control_blocks),
      number_(number),
      plan_(plan),
      rank_(rank),
      leaders_(leaders),
      result_buffer_(result_buffer) {}

bool SmallCollective::accepts(const Collective& op) {
  return !op.input.defined() || op.input.nbytes() <= shm::kInlineBytes;
}

bool SmallCollective::advance(base::Deadline deadline) {
  const std::size_t parity = number_ % 2;
  if (phase_ == Phase::kPublish) {
    publish();
    control_blocks_.advance(control_blocks_.own().published[parity], number_);
    phase_ = control_blocks_.rank() == 0 ? Phase::kWaitPublished : Phase::kWaitResult;
  }
  if (phase_ == Phase::kWaitPublished) {
    if (!have_all_published(deadline)) return false;
    start_cross_host();
    phase_ = Phase::kWaitCrossHost;
  }
  if (phase_ == Phase::kWaitCrossHost) {
    if (!cross_host_pending_->wait_until(deadline)) return false;
    if (const auto error = cross_host_pending_->error()) std::rethrow_exception(error);
    control_blocks_.own().offset[parity] = control_blocks_.arena().offset_of(result_buffer_.data);
    control_blocks_.advance(control_blocks_.own().completed, number_);
    write_output(static_cast<const char*>(result_buffer_.data));
    phase_ = Phase::kFinished;
  }
  if (phase_ == Phase::kWaitResult) {
    if (!control_blocks_.wait(0, control_blocks_.of(0).completed, number_, deadline)) return false;
    write_output(control_blocks_.arena_of(0) + control_blocks_.of(0).offset[parity]);
    phase_ = Phase::kFinished;
  }
  return true;
}

void SmallCollective::publish() {
  if (!op_.input.defined() || (op_.kind == CollectiveKind::kBroadcast && op_.root != rank_)) return;
  copy(control_blocks_.own().inline_data[number_ % 2], op_.input.const_data_ptr(), op_.input.nbytes());
}

bool SmallCollective::have_all_published(base::Deadline deadline) {
  for (; next_member_ < control_blocks_.size(); ++next_member_)
    if (!control_blocks_.wait(next_member_, control_blocks_.of(next_member_).published[number_ % 2], number_, deadline))
      return false;
  return true;
}

/// The size of the block of one host; at least one byte, because a barrier must send a message, too.
std::size_t SmallCollective::block_bytes() const {
  const std::size_t bytes = op_.input.defined() ? op_.input.nbytes() : 0;
  return std::max<std::size_t>(1, op_.kind == CollectiveKind::kAllGather ? bytes * plan_.max_host_size : bytes);
}

void SmallCollective::start_cross_host() {
  const std::size_t bytes = block_bytes();
  const bool from_root = op_.kind == CollectiveKind::kBroadcast;
  const std::size_t needed = from_root ? bytes : bytes * plan_.hosts.size();
  if (result_buffer_.bytes < needed) {
    // All local peers have published this operation, so they have read the blocks of the last one.
    control_blocks_.arena().free(result_buffer_.data);
    result_buffer_ = {control_blocks_.arena().allocate(needed), needed};
  }
  host_block_ = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
  all_blocks_ = at::from_blob(result_buffer_.data, {static_cast<std::int64_t>(needed)}, at::kByte);
  auto* block = static_cast<char*>(from_root ? result_buffer_.data : host_block_.mutable_data_ptr());
  c10::SmallVector<const char*, 16> inline_inputs;
  for (int local_rank = 0; local_rank < control_blocks_.size(); ++local_rank)
    inline_inputs.push_back(control_blocks_.of(local_rank).inline_data[number_ % 2]);
  if (reduces()) {
    reduce_into(block, inline_inputs, {0, static_cast<std::size_t>(op_.input.numel())}, 1);
  } else if (op_.kind == CollectiveKind::kAllGather) {
    std::memset(block, 0, bytes);
    for (std::size_t local_rank = 0; local_rank < inline_inputs.size(); ++local_rank)
      copy(block + local_rank * op_.input.nbytes(), inline_inputs[local_rank], op_.input.nbytes());
  } else {
    *block = 0;
  }
  if (!from_root) {
    cross_host_pending_ = leaders_->start(
        {.kind = CollectiveKind::kAllGather, .input = host_block_, .output = all_blocks_, .seq = number_});
    return;
  }
  const auto root = plan_.locations[static_cast<std::size_t>(op_.root)];
  if (root.host == plan_.locations[static_cast<std::size_t>(rank_)].host)
    copy(block, inline_inputs[static_cast<std::size_t>(root.local_rank)], op_.input.nbytes());
  cross_host_pending_ = leaders_->start({.kind = CollectiveKind::kBroadcast,
                                         .input = all_blocks_,
                                         .output = all_blocks_,
                                         .root = root.host,
                                         .seq = number_});
}

void SmallCollective::reduce_into(void* output, c10::ArrayRef<const char*> inputs, Slice slice, int divisor) const {
  c10::SmallVector<const void*, 16> parts;
  for (const char* input : inputs) parts.push_back(input + slice.first * op_.input.element_size());
  shm::reduce({.dtype = op_.input.scalar_type(),
               .op = op_.op,
               .inputs = parts.data(),
               .num_inputs = parts.size(),
               .outputs = &output,
               .num_outputs = 1,
               .count = slice.count,
               .divisor = divisor});
}

/// Computes this rank's result from the blocks of all hosts.
void SmallCollective::write_output(const char* blocks) const {
  if (!op_.output.defined()) return;
  auto* output = static_cast<char*>(op_.output.mutable_data_ptr());
  const std::size_t bytes = block_bytes();
  if (op_.kind == CollectiveKind::kBroadcast) {
    if (op_.root != rank_) copy(output, blocks, op_.output.nbytes());
  } else if (op_.kind == CollectiveKind::kAllGather) {
    const std::size_t part = op_.input.nbytes();
    for (std::size_t member = 0; member < plan_.locations.size(); ++member) {
      const auto location = plan_.locations[member];
      copy(output + member * part,
           blocks + static_cast<std::size_t>(location.host) * bytes +
               static_cast<std::size_t>(location.local_rank) * part,
           part);
    }
  } else if (reduces()) {
    c10::SmallVector<const char*, 16> hosts;
    for (std::size_t host = 0; host < plan_.hosts.size(); ++host) hosts.push_back(blocks + host * bytes);
    const auto count = static_cast<std::size_t>(op_.output.numel());
    const std::size_t first = op_.kind == CollectiveKind::kReduceScatter ? count * static_cast<std::size_t>(rank_) : 0;
    reduce_into(output, hosts, {first, count},
                op_.op == ReduceOp::kMean ? static_cast<int>(plan_.locations.size()) : 1);
  }
}

}  // namespace lockstep::comm::hierarchy
