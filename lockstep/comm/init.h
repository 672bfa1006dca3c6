// How a program becomes a rank.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "lockstep/comm/group.h"

namespace lockstep::comm {

/// All have a default that fits a program started by `lockstep run`, srun, mpirun, torchrun or by hand.
struct InitOptions {
  std::optional<int> rank;  ///< with world_size and address: says who we are without any environment
  std::optional<int> world_size;
  std::string address;   ///< "host:port" of rank 0, for explicit ranks
  std::string env_from;  ///< "auto", "none", "lockstep", "torchrun", "mpi", "slurm" or "pmi": whose variables say who
                         ///< we are; default: LOCKSTEP_ENV_FROM, else auto
  /// "auto", "self", "shm", "hierarchy", "gloo", "mpi" or "nccl"; default: LOCKSTEP_TRANSPORT, else auto. Tensors on
  /// GPUs travel by NCCL with auto, when every rank has a GPU of its own, and with nccl, which is auto for the others;
  /// with what else is named they go through the host's memory.
  std::string transport;
  std::string device;  ///< of this rank, Group::device(): "auto", which is a GPU where there are some, "cpu", "cuda" or
                       ///< "cuda:N"; default: LOCKSTEP_DEVICE, else auto
  std::string outer;   ///< of the transport hierarchy: what carries bytes between hosts, "auto", "gloo" or "mpi";
                       ///< default: LOCKSTEP_CROSS_HOST_TRANSPORT, else auto
  std::optional<bool> arena;  ///< CPU tensors made from now on lie in the arena (arena/arena.h); default:
                              ///< LOCKSTEP_ARENA, else with shm and hierarchy
  std::optional<std::chrono::milliseconds>
      join_timeout;  ///< for all ranks to come; default: LOCKSTEP_JOIN_TIMEOUT in s, else 60 s
  std::optional<std::chrono::milliseconds> timeout;  ///< that a rank waits for others that do not get on, 0: for ever;
                                                     ///< default: LOCKSTEP_TIMEOUT in s, else 300 s
};

/// The group of all ranks. Reads who this process is from what its launcher set (docs/01), meets the others at the
/// store, and compares protocol, library versions and program with them, and, when it uses MPI, the library that is
/// loaded with that of the build; a program that nobody launched is a world of one. One line on stderr of rank 0 says
/// what was found. Where the rank has a GPU, libtorch's library for them is loaded, and the GPU is the calling thread's
/// current one from then on: call init() before torch::manual_seed(), torch::cuda::is_available() and whatever else
/// asks libtorch for GPUs, or link libtorch_cuda. While a group of the world lives, another init() returns that world;
/// a rank of several that has dropped its last group cannot come back (UsageError).
///
/// Throws UsageError (variables half-set or contradictory; a rank number that joins twice), CommError kJoinTimeout
/// (naming the ranks that did not come), kConfigMismatch, kCoordinatorLost, kWrongJob, kStaleGen, kAuthFailed.
Group init(const InitOptions& options = {});

}  // namespace lockstep::comm
