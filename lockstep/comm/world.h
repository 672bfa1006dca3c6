// World: the state that all groups of a process share. Private to comm/.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/comm/gpu/cuda.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/job/health/heartbeat.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/job/injection.h"
#include "lockstep/job/store.h"
#include "lockstep/job/store_server.h"

namespace lockstep::comm::shm {
class LocalPeers;
}  // namespace lockstep::comm::shm

namespace lockstep::comm {

struct ExternalRendezvous;

/// Describes a split in which all ranks of a group take part.
struct SplitParent {
  Transport* from = nullptr;  // of the group that is split; null if there is none
  int color = 0;              // ranks with the same color are in the same new group
};

/// What connects the hosts under the transport hierarchy.
enum class CrossHostTransport {
  kNone,  ///< the transport is not hierarchy
  kTcp,
  kMpi,
  kTcpAndMpi,  ///< MPI for small operations, TCP for large ones
};
/// Returns "none", "tcp", "mpi" or "tcp and mpi", for messages and for the comparison of the ranks' settings.
std::string name(CrossHostTransport transport);

struct World {
  ~World();

  job::identity::Identity identity;
  job::JobKey key;                           // of the job
  std::unique_ptr<job::StoreServer> server;  // set if this rank serves the store
  std::shared_ptr<job::Store> store;
  std::shared_ptr<channel::DeadlockDetector> deadlock_detector;
  std::unique_ptr<job::health::Heartbeat> heartbeat;                    // set if the store or an agent can read it
  std::string transport;                                                // name of the chosen transport
  CrossHostTransport cross_host_transport = CrossHostTransport::kNone;  // unless transport is hierarchy
  std::shared_ptr<const shm::LocalPeers> local_peers;                   // for shm and hierarchy
  std::string address;                   // numeric address of this host on the network to the other hosts
  std::string interface;                 // the user's choice of network interface; may be empty
  at::Device device = at::kCPU;          // of this rank
  int num_gpus = 0;                      // visible to this rank
  std::string gpu_unavailable_reason;    // why this rank has no GPU
  gpu::Gpu gpu;                          // set if this rank has a GPU
  bool uses_nccl = false;                // GPU tensors use NCCL; otherwise they go through host memory
  std::string gpu_transport_text;        // the same, for the log
  std::chrono::milliseconds timeout{};   // limit for waits while groups are made
  job::Injection injection;              // the fault to inject, if any
  std::atomic<bool> stop_agreed{false};  // a finished reduction contained a stop request

  /// Makes a transport for channel `name` among `members` (world ranks). All members must call it; blocks until they
  /// have.
  std::shared_ptr<Transport> make_transport(const std::string& name, const std::vector<int>& members,
                                            const SplitParent& split_parent = {}) const;
  /// True for a world of one rank that was asked to use NCCL, which it would not need.
  bool is_alone_on_nccl() const { return uses_nccl && identity.world_size == 1; }

 private:
  std::shared_ptr<Transport> make_host_transport(const std::string& name, const std::vector<int>& members) const;
  void wait_for_other_ranks() noexcept;
  std::shared_ptr<Transport> make_tcp(const std::string& name, const std::vector<int>& members,
                                      bool has_thread = true) const;
  std::shared_ptr<Transport> make_mpi(const std::string& name, const std::vector<int>& members) const;
  int rank_in(const std::vector<int>& members) const;
};

/// Resolves `asked` ("auto", "tcp" or "mpi") to the transport between hosts. "auto" uses MPI only if MPI or PMI
/// numbered the ranks. Throws UsageError if the requested transport is not available.
CrossHostTransport choose_cross_host_transport(const job::identity::Identity& identity, const std::string& asked);

/// For ranks whose launcher uses MPI or PMI and does not set the address of a store: rank 0 serves the store
/// (world.server) at a free port and sends its address and the job's key to all ranks, over MPI or, if the launcher is
/// hydra and this program has no MPI or a different one, over PMI. Throws UsageError if neither is possible.
void rendezvous_over_mpi(World& world, base::Deadline deadline);

/// The same by means of the caller.
void rendezvous_over_caller(World& world, const ExternalRendezvous& rendezvous, base::Deadline deadline);

/// The same for ranks that torchrun started: rank 0 publishes the address in torchrun's own store, which every process
/// that can connect to it can read. Also connects world.store. A job key that is already set is kept.
void rendezvous_over_torchrun(World& world, base::Deadline deadline);

/// Throws UsageError if `asked` is not the name of a transport, or if this build or a world of `size` ranks does not
/// support it.
void check_transport(const std::string& asked, int size);

struct TransportChoice {
  std::string name;
  CrossHostTransport cross_host = CrossHostTransport::kNone;
  std::string reason;  ///< for the log
};
/// Chooses the transport from `asked` and from which ranks share a host. One that the user named is never replaced:
/// throws UsageError if it cannot be used. `cross_host` is the result of choose_cross_host_transport(). Pure.
TransportChoice choose_transport(const job::identity::Identity& identity, const std::string& asked,
                                 CrossHostTransport cross_host);

/// Sets up what the chosen transport needs before the first group exists. Blocks until all ranks have called it. Throws
/// CommError, and UsageError if `asked` is "nccl" and NCCL cannot be used.
void prepare_transport(World& world, const std::string& asked, base::Deadline deadline);

}  // namespace lockstep::comm
