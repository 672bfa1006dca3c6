#include "lockstep/comm/hierarchy/cross_host_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/codec/int8.h"
#include "lockstep/comm/hierarchy/host_plan.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm::hierarchy {
namespace {

using base::Deadline;

// Within these bounds, a slice is split into at least kPipelineDepth chunks, so that the network is busy while the CPU
// reduces.
constexpr std::size_t kMaxChunkBytes = 2 << 20;
constexpr std::size_t kMinChunkBytes = 256 << 10;
// The numbers of chunks whose parts are in flight to their owners (scatter) and back (gather).
constexpr std::size_t kScatterDepth = 3;
constexpr std::size_t kGatherDepth = 3;
constexpr std::size_t kPipelineDepth = kScatterDepth + kGatherDepth + 1;
constexpr auto kStopCheckInterval = std::chrono::milliseconds(20);

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

at::Tensor first_bytes(const at::Tensor& tensor, std::size_t bytes) {
  return tensor.narrow(0, 0, static_cast<std::int64_t>(bytes));
}

/// Whether float32 is sent as int8, which has bytes that are no numbers of their own.
bool is_encoded(at::ScalarType dtype, Wire wire) { return dtype == at::kFloat && wire.dtype == at::kChar; }

std::size_t wire_bytes(at::ScalarType dtype, Wire wire, std::size_t count) {
  return is_encoded(dtype, wire) ? static_cast<std::size_t>(codec::int8_bytes(static_cast<std::int64_t>(count)))
                                 : count * c10::elementSize(wire.dtype);
}

/// Gives the error feedback of an operation its sizes. If it has others, it is that of another layout of the gradients,
/// and begins anew.
void prepare(ErrorFeedback& feedback, std::size_t sent, std::size_t result) {
  const auto fit = [](at::Tensor& tensor, std::size_t count) {
    if (!tensor.defined() || tensor.numel() != static_cast<std::int64_t>(count))
      tensor = at::zeros({static_cast<std::int64_t>(count)}, at::kFloat);
  };
  fit(feedback.sent, sent);
  fit(feedback.result, result);
}

std::size_t count_of(const std::vector<ElementRange>& ranges) {
  std::size_t count = 0;
  for (const ElementRange& range : ranges) count += range.count;
  return count;
}

}  // namespace

CrossHostGroup::CrossHostGroup(std::shared_ptr<Transport> cross_host_transport, int host, int num_hosts,
                               const std::atomic<bool>& stop)
    : cross_host_transport_(std::move(cross_host_transport)),
      host_(host),
      num_hosts_(static_cast<std::size_t>(num_hosts)),
      stop_(stop),
      slots_(kPipelineDepth) {}

void CrossHostGroup::wait(const PendingPtr& pending) const {
  while (!pending->wait_until(Deadline::in(kStopCheckInterval)))
    if (stop_.load()) throw std::runtime_error("the transport was aborted");
  if (const auto error = pending->error()) std::rethrow_exception(error);
  // A large operation makes progress with each chunk.
  base::telemetry::RankPage::this_process().alive_count.fetch_add(1, std::memory_order_relaxed);
}

PendingPtr CrossHostGroup::start(CollectiveKind kind, const at::Tensor& input, const at::Tensor& output, int root) {
  return cross_host_transport_->start({.kind = kind, .input = input, .output = output, .root = root, .seq = ++seq_});
}

void CrossHostGroup::allocate_slots(std::size_t chunk_bytes) {
  const auto bytes = static_cast<std::int64_t>(chunk_bytes);
  for (PipelineSlot& slot : slots_) {
    if (slot.sent.defined() && slot.sent.numel() >= bytes) continue;
    for (at::Tensor* tensor : {&slot.sent, &slot.received, &slot.part, &slot.all})
      *tensor = at::empty({bytes}, at::kByte);
  }
}

void CrossHostGroup::all_reduce(const LocalSlices& slices, ReduceOp op, int divisor, Wire wire) {
  if (slices.dtype != at::kFloat) wire.dtype = slices.dtype;
  const bool encodes = is_encoded(slices.dtype, wire);
  const std::size_t unit = (encodes ? static_cast<std::size_t>(codec::kInt8Block) : 64) * num_hosts_;
  const std::size_t element = c10::elementSize(wire.dtype);
  const std::size_t target_bytes = std::clamp(slices.count * element / kPipelineDepth, kMinChunkBytes, kMaxChunkBytes);
  const std::size_t step = (std::min(target_bytes / element, slices.count) + unit - 1) / unit * unit;
  allocate_slots(wire_bytes(slices.dtype, wire, step));
  if (wire.dtype != slices.dtype) unrounded_ = at::empty({static_cast<std::int64_t>(step)}, at::kFloat);
  const std::size_t num_chunks = slices.count == 0 ? 0 : (slices.count + step - 1) / step;
  if (encodes) part_sums_ = at::empty({static_cast<std::int64_t>(step / num_hosts_)}, at::kFloat);
  if (encodes && wire.error_feedback) prepare(*wire.error_feedback, num_chunks * step, num_chunks * step / num_hosts_);
  // The order depends on i alone, so all members of the group start the same operations in the same order.
  for (std::size_t i = 0; i < num_chunks + kScatterDepth + kGatherDepth; ++i) {
    if (i < num_chunks) {
      PipelineSlot& slot = slots_[i % kPipelineDepth];
      slot.first = i * step;
      slot.count = std::min(step, slices.count - slot.first);
      slot.part_count = (slot.count + num_hosts_ - 1) / num_hosts_;
      if (encodes) slot.part_count = (slot.count + unit - 1) / unit * static_cast<std::size_t>(codec::kInt8Block);
      slot.part_bytes = wire_bytes(slices.dtype, wire, slot.part_count);
      start_scatter(slices, op, wire, slot);
    }
    if (i >= kScatterDepth && i - kScatterDepth < num_chunks)
      start_gather(op, divisor, wire, slices.dtype, slots_[(i - kScatterDepth) % kPipelineDepth]);
    if (i >= kScatterDepth + kGatherDepth)
      store_result(slices, wire, slots_[(i - kScatterDepth - kGatherDepth) % kPipelineDepth]);
  }
}

/// Reduces the chunk among the ranks of this host and starts to send each host its part.
void CrossHostGroup::start_scatter(const LocalSlices& slices, ReduceOp op, Wire wire, PipelineSlot& slot) {
  const std::size_t element = c10::elementSize(slices.dtype);
  c10::SmallVector<const void*, 16> inputs;
  for (const char* local : slices.locals) inputs.push_back(local + slot.first * element);
  void* sum = wire.dtype == slices.dtype ? bytes_of(slot.sent) : bytes_of(unrounded_);
  shm::reduce_to(sum, inputs, slices.dtype, op, slot.count);
  const std::size_t bytes = slot.part_bytes * num_hosts_;
  if (is_encoded(slices.dtype, wire)) {
    encode_sums(slot, wire.error_feedback);
  } else {
    if (wire.dtype != slices.dtype)
      shm::convert(
          {.from = slices.dtype, .to = wire.dtype, .input = sum, .output = bytes_of(slot.sent), .count = slot.count});
    const std::size_t used = slot.count * c10::elementSize(wire.dtype);
    std::memset(bytes_of(slot.sent) + used, 0, bytes - used);
  }
  slot.scatter_pending =
      start(CollectiveKind::kAllToAll, first_bytes(slot.sent, bytes), first_bytes(slot.received, bytes));
}

/// Encodes the sums in unrounded_, which are followed by zeros.
void CrossHostGroup::encode_sums(PipelineSlot& slot, ErrorFeedback* error_feedback) {
  const std::size_t padded = slot.part_count * num_hosts_;
  auto* const sums = unrounded_.mutable_data_ptr<float>();
  auto* values = sums;
  if (error_feedback) {
    values = error_feedback->sent.mutable_data_ptr<float>() + slot.first;
    for (std::size_t i = 0; i < slot.count; ++i) values[i] += sums[i];
  } else {
    std::fill(sums + slot.count, sums + padded, 0.0F);
  }
  codec::encode_int8(values, static_cast<std::int64_t>(padded), slot.sent.mutable_data_ptr<std::uint8_t>());
}

/// Reduces this host's part over all hosts and starts to send the result to all of them.
void CrossHostGroup::start_gather(ReduceOp op, int divisor, Wire wire, at::ScalarType dtype, PipelineSlot& slot) {
  wait(slot.scatter_pending);
  if (is_encoded(dtype, wire))
    add_encoded_parts(slot, divisor, wire.error_feedback);
  else
    reduce_parts(slot, op, divisor, wire.dtype);
  slot.gather_pending = start(CollectiveKind::kAllGather, first_bytes(slot.part, slot.part_bytes),
                              first_bytes(slot.all, slot.part_bytes * num_hosts_));
}

/// Reduces the parts of all hosts, in the order of the hosts.
void CrossHostGroup::reduce_parts(PipelineSlot& slot, ReduceOp op, int divisor, at::ScalarType wire_dtype) {
  c10::SmallVector<const void*, 16> inputs;
  for (std::size_t host = 0; host < num_hosts_; ++host)
    inputs.push_back(bytes_of(slot.received) + host * slot.part_bytes);
  shm::reduce_to(bytes_of(slot.part), inputs, wire_dtype, op, slot.part_count, divisor);
}

/// The same for encoded parts; encodes their mean.
void CrossHostGroup::add_encoded_parts(PipelineSlot& slot, int divisor, ErrorFeedback* error_feedback) {
  const auto count = static_cast<std::int64_t>(slot.part_count);
  auto* sums = part_sums_.mutable_data_ptr<float>();
  if (error_feedback)
    sums = error_feedback->result.mutable_data_ptr<float>() + slot.first / num_hosts_;
  else
    std::fill_n(sums, count, 0.0F);
  for (std::size_t host = 0; host < num_hosts_; ++host)
    codec::add_int8(slot.received.const_data_ptr<std::uint8_t>() + host * slot.part_bytes, count,
                    1 / static_cast<float>(divisor), sums);
  codec::encode_int8(sums, count, slot.part.mutable_data_ptr<std::uint8_t>());
}

/// Writes the result of the chunk to the slices of all ranks of this host.
void CrossHostGroup::store_result(const LocalSlices& slices, Wire wire, PipelineSlot& slot) {
  wait(slot.gather_pending);
  const void* result = bytes_of(slot.all);
  if (is_encoded(slices.dtype, wire)) {
    const std::size_t padded = slot.part_count * num_hosts_;
    auto* const decoded = unrounded_.mutable_data_ptr<float>();
    std::fill_n(decoded, padded, 0.0F);
    codec::add_int8(slot.all.const_data_ptr<std::uint8_t>(), static_cast<std::int64_t>(padded), 1, decoded);
    result = decoded;
    wire.dtype = slices.dtype;
  }
  for (char* local : slices.locals)
    shm::convert({.from = wire.dtype,
                  .to = slices.dtype,
                  .input = result,
                  .output = local + slot.first * c10::elementSize(slices.dtype),
                  .count = slot.count});
}

void CrossHostGroup::reduce_scatter(const LocalSlices& slices, const NeededElements& needed, ReduceOp op, int divisor,
                                    at::ScalarType wire_dtype) {
  if (slices.dtype != at::kFloat) wire_dtype = slices.dtype;
  std::size_t most = 0;  // elements of a host; the others' messages are padded to it
  for (const std::vector<ElementRange>& ranges : needed) most = std::max(most, count_of(ranges));
  const std::size_t element = c10::elementSize(wire_dtype);
  const std::size_t chunk = std::clamp(most * num_hosts_ * element / kPipelineDepth, kMinChunkBytes, kMaxChunkBytes);
  const std::size_t part = (std::min(chunk / element / num_hosts_, most) + 63) / 64 * 64;
  allocate_slots(part * num_hosts_ * element);
  if (wire_dtype != slices.dtype) unrounded_ = at::empty({static_cast<std::int64_t>(part * num_hosts_)}, at::kFloat);
  const std::size_t num_chunks = most == 0 ? 0 : (most + part - 1) / part;
  for (std::size_t i = 0; i < num_chunks + kScatterDepth; ++i) {
    if (i < num_chunks) {
      PipelineSlot& slot = slots_[i % kPipelineDepth];
      slot.first = i * part;
      slot.part_count = std::min(part, most - slot.first);
      slot.part_bytes = slot.part_count * element;
      start_scatter_of_needed(slices, needed, op, wire_dtype, slot);
    }
    if (i >= kScatterDepth)
      store_needed(slices, needed[static_cast<std::size_t>(host_)], op, divisor, wire_dtype,
                   slots_[(i - kScatterDepth) % kPipelineDepth]);
  }
}

/// Reduces the chunk among the ranks of this host, and starts to send each host what it needs.
void CrossHostGroup::start_scatter_of_needed(const LocalSlices& slices, const NeededElements& needed, ReduceOp op,
                                             at::ScalarType wire_dtype, PipelineSlot& slot) {
  const std::size_t element = c10::elementSize(slices.dtype), all = slot.part_count * num_hosts_;
  char* const sums = bytes_of(wire_dtype == slices.dtype ? slot.sent : unrounded_);
  for (std::size_t host = 0; host < num_hosts_; ++host) {
    char* const part = sums + host * slot.part_count * element;
    std::size_t filled = 0;
    for_each_piece(needed[host], slot.first, slot.first + slot.part_count,
                   [&](std::size_t first, std::size_t count, std::size_t place) {
                     c10::SmallVector<const void*, 16> inputs;
                     for (const char* local : slices.locals) inputs.push_back(local + first * element);
                     shm::reduce_to(part + place * element, inputs, slices.dtype, op, count);
                     filled = place + count;
                   });
    std::memset(part + filled * element, 0, (slot.part_count - filled) * element);
  }
  if (wire_dtype != slices.dtype)
    shm::convert({.from = slices.dtype, .to = wire_dtype, .input = sums, .output = bytes_of(slot.sent), .count = all});
  const std::size_t bytes = slot.part_bytes * num_hosts_;
  slot.scatter_pending =
      start(CollectiveKind::kAllToAll, first_bytes(slot.sent, bytes), first_bytes(slot.received, bytes));
}

/// Reduces what this host needs over all hosts, and writes it to the slices of all ranks of this host.
void CrossHostGroup::store_needed(const LocalSlices& slices, const std::vector<ElementRange>& needed, ReduceOp op,
                                  int divisor, at::ScalarType wire_dtype, PipelineSlot& slot) {
  wait(slot.scatter_pending);
  reduce_parts(slot, op, divisor, wire_dtype);
  for_each_piece(needed, slot.first, slot.first + slot.part_count,
                 [&](std::size_t first, std::size_t count, std::size_t place) {
                   for (char* local : slices.locals)
                     shm::convert({.from = wire_dtype,
                                   .to = slices.dtype,
                                   .input = bytes_of(slot.part) + place * c10::elementSize(wire_dtype),
                                   .output = local + first * c10::elementSize(slices.dtype),
                                   .count = count});
                 });
}

void CrossHostGroup::broadcast(const LocalSlices& slices, int root, std::size_t source) {
  const std::size_t element = c10::elementSize(slices.dtype);
  const std::size_t bytes = slices.count * element;
  const std::size_t num_chunks = (bytes + kMaxChunkBytes - 1) / kMaxChunkBytes;
  char* own = slices.locals[host_ == root ? source : 0];
  std::vector<PendingPtr> in_flight;
  for (std::size_t i = 0; i < num_chunks + kScatterDepth; ++i) {
    if (i < num_chunks) {
      const std::size_t first = i * kMaxChunkBytes;
      const at::Tensor chunk =
          at::from_blob(own + first, {static_cast<std::int64_t>(std::min(kMaxChunkBytes, bytes - first))}, at::kByte);
      in_flight.push_back(start(CollectiveKind::kBroadcast, chunk, chunk, root));
    }
    if (i < kScatterDepth) continue;
    const std::size_t first = (i - kScatterDepth) * kMaxChunkBytes;
    wait(in_flight[i - kScatterDepth]);
    for (char* local : slices.locals)
      if (local != own) std::memcpy(local + first, own + first, std::min(kMaxChunkBytes, bytes - first));
  }
}

}  // namespace lockstep::comm::hierarchy
