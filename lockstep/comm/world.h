// What all groups of a process have in common. Private to comm/.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/channel/deadlock_detector.h"
#include "lockstep/comm/cuda/cuda.h"
#include "lockstep/comm/interface/transport.h"
#include "lockstep/job/health/heartbeat.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/job/injection.h"
#include "lockstep/job/store.h"
#include "lockstep/job/store_server.h"

namespace lockstep::comm {

class LocalPeers;
enum class Scope;

/// The group that another is split off, by all ranks of it.
struct SplitParent {
  Transport* from = nullptr;
  int color = 0;  // ranks with the same are together
};

struct World {
  ~World();

  job::Identity identity;
  job::JobKey key;                           // of its store
  std::unique_ptr<job::StoreServer> server;  // when this rank serves the store
  std::shared_ptr<job::Store> store;
  std::shared_ptr<DeadlockDetector> deadlock_detector;
  std::unique_ptr<job::Heartbeat> heartbeat;     // when anybody may look
  std::string transport;                         // the chosen one's name
  std::string outer;                             // when it is hierarchy: what carries bytes between hosts
  std::shared_ptr<const LocalPeers> neighbours;  // when it is shm or hierarchy
  std::string address;                           // of this host on the network to the others, as numbers
  std::string interface;                         // what the user asked for instead; may be empty
  at::Device device = at::kCPU;                  // of this rank
  int num_gpus = 0;                              // that this rank sees
  std::string gpu_unavailable_reason;            // why it has none
  Gpu gpu;                                       // when it has one
  bool uses_nccl = false;                        // tensors there travel by NCCL; else through the host's memory
  std::string gpu_transport_text;                // the same in words
  std::chrono::milliseconds timeout{};           // of what groups need of each other when they are made
  std::atomic<std::int64_t> steps{0};
  std::atomic<std::int64_t> batches{0};
  std::atomic<std::uint32_t> order{0};  // of the samples of those that were drawn for all: a sum of fingerprints
  job::Injection injection;             // a fault that was asked for
  bool stop_agreed = false;             // by all ranks, in an exchange

  /// A transport for the channel `name` among `members` (world ranks); all of them call it, and it waits for them.
  std::shared_ptr<Transport> make_transport(const std::string& name, const std::vector<int>& members,
                                            const SplitParent& split_parent = {}) const;

 private:
  std::shared_ptr<Transport> make_host_transport(const std::string& name, const std::vector<int>& members) const;
  void wait_for_other_ranks() noexcept;
  std::shared_ptr<Transport> make_gloo(const std::string& name, const std::vector<int>& members, int threads) const;
  std::shared_ptr<Transport> make_mpi(const std::string& name, const std::vector<int>& members) const;
  std::shared_ptr<Transport> make_cross_host(Scope scope, const std::string& name,
                                             const std::vector<int>& members) const;
  int rank_in(const std::vector<int>& members) const;
};

/// What `asked`, "auto", "gloo" or "mpi", is here. Throws UsageError when it cannot be had. auto uses MPI only for
/// ranks that it numbered.
std::string choose_cross_host_transport(const job::Identity& identity, const std::string& asked);

/// Where the ranks meet, when their launcher speaks MPI or PMI and said nothing of it: rank 0 serves the store,
/// world.server, at a port that it picks, and all learn by MPI where, and the job's key; from the launcher itself when
/// it is hydra and this program has no MPI, or another. Throws UsageError where neither can be.
void rendezvous_over_mpi(World& world, base::Deadline deadline);

/// The same when torchrun has started them: they learn it from torchrun's own store, which whoever reaches it can read,
/// and world.store is connected. A key that the ranks have stays.
void rendezvous_over_torchrun(World& world, base::Deadline deadline);

/// The names that --transport takes, "auto" first.
const std::vector<std::string>& transport_names();

/// Throws UsageError when `asked`, "auto" or a name, is none of a transport, or one that this build or a world of
/// `size` cannot have.
void check_transport(const std::string& asked, int size);

/// Fills world.transport from what was asked for and who shares a host, and returns the reason. Throws UsageError when
/// the one that was named cannot be had: it is never replaced. `outer` is what choose_cross_host_transport() returned.
std::string choose_transport(World& world, const std::string& asked, const std::string& outer);

/// What the chosen transport needs of the other ranks before the first group. Waits for them. Throws CommError, and
/// UsageError when `asked`, the transport that was named, is NCCL and cannot be had.
void prepare_transport(World& world, const std::string& asked, base::Deadline deadline);

}  // namespace lockstep::comm
