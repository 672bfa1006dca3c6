// Copies batches from the host to a GPU ahead of their use.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <functional>

#include "lockstep/base/deadline.h"
#include "lockstep/data/visit_tensors.h"

namespace lockstep::data {

/// Calls visit_tensors() for a batch whose type is erased.
using BatchVisitor = std::function<void(void* batch, const TensorVisitor& visit)>;

/// Throws UsageError unless `device` is cpu or an accelerator that libtorch can use in this process.
void check_device(at::Device device);

/// Moves the batch's host tensors into pinned memory, from which copies to `device` run asynchronously. The memory
/// comes from libtorch, which reuses it after the copies from it are complete. Thread-safe for different batches.
void pin_memory(void* batch, const BatchVisitor& visitor, at::Device device);

/// Copies batches to a device on a separate stream. Not thread-safe.
class DevicePrefetcher {
 public:
  /// "cuda" without an index selects the calling thread's current GPU. `device` must have passed check_device() and
  /// must not be cpu.
  DevicePrefetcher(at::Device device, BatchVisitor visitor);

  /// The device, including its index.
  at::Device device() const { return stream_.device(); }
  /// Let k be the batch that was delivered last. Blocks until the device has executed the work that was on the
  /// consumer's stream when batch k - 1 was delivered. This bounds how far a program that never synchronizes runs ahead
  /// of the device, and therefore the memory of its batches. Returns false if the work is not complete by `deadline`.
  bool wait_for_consumer(base::Deadline deadline) const;
  /// Replaces the batch's host tensors by device tensors whose contents are copied asynchronously. Does not block if
  /// the host tensors are pinned.
  void start_copy(void* batch);
  /// Makes the calling thread's current stream wait for the copy that was started last. Work that this thread then
  /// enqueues on that stream reads the copied contents. libtorch does not reuse the tensors' memory until all work that
  /// was enqueued on that stream before their destruction has completed. Does not block the host.
  void wait_on_current_stream(void* batch);

 private:
  const BatchVisitor visitor_;
  const at::Stream stream_;
  c10::Event copy_done_;
  std::array<c10::Event, 2> consumed_;  // recorded on the consumer's stream when a batch is delivered
  std::size_t num_delivered_ = 0;
};

}  // namespace lockstep::data
