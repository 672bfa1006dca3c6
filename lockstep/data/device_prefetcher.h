// Batches on their way from the host to a GPU, before they are used.
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

/// visit_tensors() for a batch whose type the caller knows.
using BatchVisitor = std::function<void(void* batch, const TensorVisitor& visit)>;

/// Throws UsageError unless `device` is cpu or one that libtorch can use in this process.
void check_device(at::Device device);

/// Moves what is on the host into pinned memory, from where a copy to `device` goes on by itself. Any thread. That
/// memory comes from libtorch, which uses it again when the copies from it are done.
void pin_memory(void* batch, const BatchVisitor& visitor, at::Device device);

/// Copies on a stream of their own. One thread uses it.
class DevicePrefetcher {
 public:
  /// "cuda" is the calling thread's current GPU. `device` has passed check_device() and is not cpu.
  DevicePrefetcher(at::Device device, BatchVisitor visitor);

  /// With its index.
  at::Device device() const { return stream_.device(); }
  /// Waits until the device is done with what was put on the current stream before the last batch but one was handed
  /// over, so that whoever never waits for it does not run ahead of it for as long as there is memory. False when it is
  /// not done by then.
  bool wait_for_consumer(base::Deadline deadline) const;
  /// The batch's tensors on the host are ones on the device from now on, whose contents are on their way. Does not wait
  /// when they were pinned.
  void start_copy(void* batch);
  /// What this thread puts on its current stream from now on finds the contents; the memory is not used again before
  /// what it has put there until the tensors are gone is done. For what was started last. Does not wait.
  void wait_on_current_stream(void* batch);

 private:
  const BatchVisitor visitor_;
  const at::Stream stream_;
  c10::Event copy_done_;
  std::array<c10::Event, 2> consumed_;  // on the users' stream, when a batch was handed over
  std::size_t num_delivered_ = 0;
};

}  // namespace lockstep::data
