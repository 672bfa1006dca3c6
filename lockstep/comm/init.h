// init(): joins this process to its job as a rank and returns the group of all ranks.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "lockstep/comm/group.h"

namespace lockstep::comm {

/// Options of init(). The defaults fit a program that is started by `lockstep run`, srun, mpirun, torchrun or by hand.
struct InitOptions {
  /// This process's rank. With world_size and address it replaces the launcher's environment variables.
  std::optional<int> rank = {};
  std::optional<int> world_size = {};
  /// "host:port" of rank 0, for explicit ranks.
  std::string address = {};
  /// The launcher whose environment variables define the rank: "auto", "none", "lockstep", "torchrun", "mpi", "slurm",
  /// "pmi" or "pod". Defaults to LOCKSTEP_ENV_FROM, else "auto".
  std::string env_from = {};
  /// "auto", "self", "shm", "hierarchy", "tcp", "mpi" or "nccl". Defaults to LOCKSTEP_TRANSPORT, else "auto". Tensors
  /// on GPUs use NCCL with "auto" if every rank has a GPU of its own, and with "nccl", which equals "auto" for CPU
  /// tensors. With any other name, GPU tensors are copied through host memory.
  std::string transport = {};
  /// Device of this rank, see Group::device(): "auto" (a GPU if one is visible), "cpu", "cuda" or "cuda:N". Defaults to
  /// LOCKSTEP_DEVICE, else "auto".
  std::string device = {};
  /// The transport between hosts, for the transport hierarchy: "auto", "tcp" or "mpi". Defaults to
  /// LOCKSTEP_CROSS_HOST_TRANSPORT, else "auto".
  std::string cross_host_transport = {};
  /// Whether CPU tensors that are created after init() are allocated in the arena (arena/arena.h). Defaults to
  /// LOCKSTEP_ARENA, else to true with the transports shm and hierarchy.
  std::optional<bool> arena = {};
  /// How long init() waits for all ranks to join. Defaults to LOCKSTEP_JOIN_TIMEOUT (seconds), else 60 s, or 600 s
  /// in pods and with plain RANK and WORLD_SIZE.
  std::optional<std::chrono::milliseconds> join_timeout = {};
  /// How long a rank waits for ranks that make no progress; 0 means no limit. Defaults to LOCKSTEP_TIMEOUT (seconds),
  /// else 300 s.
  std::optional<std::chrono::milliseconds> timeout = {};

  bool operator==(const InitOptions&) const = default;
};

/// Joins the job and returns the group of all ranks; blocks until all ranks have joined.
///
/// Reads this process's rank from the variables of its launcher (docs/guide/01-first-run.md), connects to the job's
/// store, and compares the protocol, the library versions and the program with the other ranks. If the rank uses MPI,
/// init() also compares the loaded MPI library with the one of the build. A program without a launcher becomes a world
/// of one rank. Rank 0 prints one line on stderr that describes the job. Under `lockstep run`, init() makes stdout
/// write each line when it ends, as on a terminal.
///
/// If the rank has a GPU, init() loads libtorch's CUDA library and makes the GPU the calling thread's current one.
/// Therefore call init() before torch::manual_seed(), torch::cuda::is_available() and other functions that query GPUs,
/// or link libtorch_cuda.
///
/// While a group of the world exists, another init() returns the same world; it must pass the same options, or none.
/// After a rank of a world of several ranks has destroyed its last group, init() throws a UsageError.
///
/// Throws UsageError (incomplete or contradictory variables; two processes with the same rank) and CommError with cause
/// kJoinTimeout (names the ranks that did not join), kConfigMismatch, kCoordinatorLost, kWrongJob, kStaleGen or
/// kAuthFailed.
Group init(const InitOptions& options = {});

/// For ranks that another library has numbered and connected, such as torch.distributed.
struct ExternalRendezvous {
  int rank = 0;
  int world_size = 1;
  /// A host; rank 0 serves the job's store at the address from which it reaches that host. If this is a loopback
  /// address, all ranks are on one host; if it is a name that resolves to one, or empty, they may be on several.
  std::string towards = "127.0.0.1";
  /// Returns on every rank the text that rank 0 passes, of at most 1 KiB. Blocks until rank 0 has called it; returns ""
  /// if it has not by the deadline.
  std::function<std::string(const std::string& text, base::Deadline deadline)> exchange = {};
};
/// init() without a launcher's variables: rank 0 sends the address of its store, and the job's key, by `rendezvous`.
/// `options` have no rank, world_size, address and env_from.
Group init(const InitOptions& options, const ExternalRendezvous& rendezvous);

}  // namespace lockstep::comm
