// Selects the GPU of a rank and decides how tensors on GPUs are transported. Private to comm/.
#pragma once

#include <string>

#include "lockstep/base/deadline.h"

namespace lockstep::comm {

struct World;

/// The device that the user requested with InitOptions.device or LOCKSTEP_DEVICE. If neither `cpu` nor `gpu` is set,
/// the rank uses a GPU if one is visible.
struct DeviceRequest {
  bool cpu = false;
  bool gpu = false;  ///< a GPU is required
  int index = -1;    ///< -1: selected by the local rank
};
/// Parses "auto", "cpu", "cuda" or "cuda:N". Throws UsageError for other strings. Pure.
DeviceRequest parse_device(const std::string& asked);

/// Returns whether this rank is to use a GPU. If so, loads libtorch's CUDA library; call it before anything is
/// allocated on a GPU. Fills world.num_gpus and world.gpu_unavailable_reason. Throws UsageError if the requested GPU
/// does not exist or libtorch's CUDA library cannot be loaded.
bool detect_gpus(World& world, const DeviceRequest& request);

/// Selects a GPU after the ranks have joined: the requested one, else the one whose index is the local rank modulo the
/// number of visible GPUs. Makes it current and fills world.gpu and world.device. Throws base::Error (kResource).
void select_gpu(World& world, const DeviceRequest& request);

/// What a rank can do with the NCCL that it has loaded.
struct NcclSupport {
  std::string version;
  std::string unavailable_reason;   ///< empty: it can be used
  std::string cannot_share_reason;  ///< empty: several ranks on one GPU can use it
};

/// Agrees with the other ranks on whether tensors on GPUs use NCCL. All ranks must call it; blocks until they have.
/// `asked` is the transport that the user named, or "auto"; `nccl` is this rank's. Fills world.uses_nccl and
/// world.gpu_transport_text. Throws UsageError if the user named NCCL and it cannot be used, CommError if a rank does
/// not answer before the deadline.
void negotiate_gpu_transport(World& world, const std::string& asked, const NcclSupport& nccl, base::Deadline deadline);

}  // namespace lockstep::comm
