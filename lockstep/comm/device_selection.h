// Which GPU a rank has, and how tensors there travel. Private to comm/.
#pragma once

#include <string>

#include "lockstep/base/deadline.h"

namespace lockstep::comm {

struct World;

/// What a user asked for with InitOptions.device or LOCKSTEP_DEVICE.
struct DeviceRequest {
  bool cpu = false;
  bool gpu = false;  ///< without one there is an error; neither: a GPU where there is one
  int index = -1;    ///< -1: by the local rank
};
/// "auto", "cpu", "cuda" or "cuda:N"; else a UsageError. Pure.
DeviceRequest parse_device(const std::string& asked);

/// Whether this rank is to have a GPU; then libtorch's library for them is loaded, and so before anything is on one.
/// Fills world.num_gpus and world.gpu_unavailable_reason. Throws UsageError when there must be one and is none.
bool detect_gpus(World& world, const DeviceRequest& request);

/// After the ranks have joined: takes one, the one with this rank's number on its host among those that it sees, from
/// the beginning again when there are fewer. Fills world.gpu and world.device.
void select_gpu(World& world, const DeviceRequest& request);

/// Says what each rank has, and hears from all what follows. All ranks call it, or none; it waits for them. Fills
/// world.uses_nccl and world.gpu_transport_text. `asked` is the transport that the user named, or "auto".
/// `nccl_version` and `nccl_unavailable_reason` are this rank's. Throws UsageError when NCCL was named and cannot be
/// had.
void negotiate_gpu_transport(World& world, const std::string& asked, const std::string& nccl_version,
                             const std::string& nccl_unavailable_reason, base::Deadline deadline);

}  // namespace lockstep::comm
