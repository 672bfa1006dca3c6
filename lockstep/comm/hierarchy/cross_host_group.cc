#include "lockstep/comm/hierarchy/cross_host_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "lockstep/base/telemetry/rank_page.h"
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

void CrossHostGroup::all_reduce(const LocalSlices& slices, ReduceOp op, int divisor, at::ScalarType wire_dtype) {
  if (slices.dtype != at::kFloat) wire_dtype = slices.dtype;
  const std::size_t unit = 64 * num_hosts_;
  const std::size_t target_bytes =
      std::clamp(slices.count * c10::elementSize(wire_dtype) / kPipelineDepth, kMinChunkBytes, kMaxChunkBytes);
  const std::size_t step =
      (std::min(target_bytes / c10::elementSize(wire_dtype), slices.count) + unit - 1) / unit * unit;
  allocate_slots(step * c10::elementSize(wire_dtype));
  if (wire_dtype != slices.dtype) unrounded_ = at::empty({static_cast<std::int64_t>(step)}, at::kFloat);
  const std::size_t num_chunks = slices.count == 0 ? 0 : (slices.count + step - 1) / step;
  // The order depends on i alone, so all members of the group start the same operations in the same order.
  for (std::size_t i = 0; i < num_chunks + kScatterDepth + kGatherDepth; ++i) {
    if (i < num_chunks) {
      PipelineSlot& slot = slots_[i % kPipelineDepth];
      slot.first = i * step;
      slot.count = std::min(step, slices.count - slot.first);
      slot.part_count = (slot.count + num_hosts_ - 1) / num_hosts_;
      start_scatter(slices, op, wire_dtype, slot);
    }
    if (i >= kScatterDepth && i - kScatterDepth < num_chunks)
      start_gather(op, divisor, wire_dtype, slots_[(i - kScatterDepth) % kPipelineDepth]);
    if (i >= kScatterDepth + kGatherDepth)
      store_result(slices, wire_dtype, slots_[(i - kScatterDepth - kGatherDepth) % kPipelineDepth]);
  }
}

/// Reduces the chunk among the ranks of this host and starts to send each host its part.
void CrossHostGroup::start_scatter(const LocalSlices& slices, ReduceOp op, at::ScalarType wire_dtype,
                                   PipelineSlot& slot) {
  const std::size_t element = c10::elementSize(slices.dtype);
  c10::SmallVector<const void*, 16> inputs;
  for (const char* local : slices.locals) inputs.push_back(local + slot.first * element);
  void* sum = wire_dtype == slices.dtype ? bytes_of(slot.sent) : bytes_of(unrounded_);
  shm::reduce_to(sum, inputs, slices.dtype, op, slot.count);
  if (wire_dtype != slices.dtype)
    shm::convert(
        {.from = slices.dtype, .to = wire_dtype, .input = sum, .output = bytes_of(slot.sent), .count = slot.count});
  const std::size_t wire_element_bytes = c10::elementSize(wire_dtype);
  const std::size_t bytes = slot.part_count * num_hosts_ * wire_element_bytes;
  std::memset(bytes_of(slot.sent) + slot.count * wire_element_bytes, 0, bytes - slot.count * wire_element_bytes);
  slot.scatter_pending =
      start(CollectiveKind::kAllToAll, first_bytes(slot.sent, bytes), first_bytes(slot.received, bytes));
}

/// Reduces this host's part over all hosts and starts to send the result to all of them.
void CrossHostGroup::start_gather(ReduceOp op, int divisor, at::ScalarType wire_dtype, PipelineSlot& slot) {
  wait(slot.scatter_pending);
  const std::size_t part_bytes = slot.part_count * c10::elementSize(wire_dtype);
  c10::SmallVector<const void*, 16> inputs;
  for (std::size_t host = 0; host < num_hosts_; ++host) inputs.push_back(bytes_of(slot.received) + host * part_bytes);
  shm::reduce_to(bytes_of(slot.part), inputs, wire_dtype, op, slot.part_count, divisor);
  slot.gather_pending = start(CollectiveKind::kAllGather, first_bytes(slot.part, part_bytes),
                              first_bytes(slot.all, part_bytes * num_hosts_));
}

/// Writes the result of the chunk to the slices of all ranks of this host.
void CrossHostGroup::store_result(const LocalSlices& slices, at::ScalarType wire_dtype, PipelineSlot& slot) {
  wait(slot.gather_pending);
  for (char* local : slices.locals)
    shm::convert({.from = wire_dtype,
                  .to = slices.dtype,
                  .input = bytes_of(slot.all),
                  .output = local + slot.first * c10::elementSize(slices.dtype),
                  .count = slot.count});
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
