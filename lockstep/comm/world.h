// What all groups of a process have in common. Private to comm/.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/seam/transport.h"
#include "lockstep/comm/watch.h"
#include "lockstep/job/identity.h"
#include "lockstep/job/store.h"
#include "lockstep/job/store_server.h"

namespace lockstep::comm {

class Neighbours;
enum class Leg;

struct World {
  ~World();

  job::Identity identity;
  std::unique_ptr<job::StoreServer> server;  // when this rank serves the store
  std::shared_ptr<job::Store> store;
  std::shared_ptr<Watch> watch;
  std::string transport;                 // the chosen one's name
  std::string outer;                     // when it is hierarchy: what carries bytes between hosts
  std::shared_ptr<const Neighbours> neighbours;  // when it is shm or hierarchy
  std::string address;                   // of this host on the network to the others, as numbers
  std::string interface;                 // what the user asked for instead; may be empty
  std::chrono::milliseconds timeout{};
  std::atomic<std::int64_t> steps{0};
  std::atomic<std::int64_t> batches{0};

  /// A transport for the channel `name` among `members` (world ranks); all of them call it, and it waits for them.
  std::shared_ptr<Transport> make_transport(const std::string& name, const std::vector<int>& members) const;

 private:
  std::shared_ptr<Transport> make_gloo(const std::string& name, const std::vector<int>& members, int threads) const;
  std::shared_ptr<Transport> make_outer(Leg leg, const std::string& name, const std::vector<int>& members) const;
  int place_in(const std::vector<int>& members) const;
};

/// Throws UsageError when `asked` is none of auto, gloo and mpi.
void check_outer(const std::string& asked);

/// The names that --transport takes, "auto" first.
const std::vector<std::string>& transport_names();

/// Throws UsageError when `asked`, "auto" or a name, is none of a transport, or one that this build or a world of `size` cannot have.
void check_transport(const std::string& asked, int size);

/// Fills world.transport from what was asked for and who shares a host, and returns the reason. Throws UsageError when the one that
/// was named cannot be had: it is never replaced.
/// `outer` says what is to carry the bytes between hosts.
std::string choose_transport(World& world, const std::string& asked, const std::string& outer);

/// What the chosen transport needs of the other ranks before the first group. Waits for them. Throws CommError.
void prepare_transport(World& world, base::Deadline deadline);

}  // namespace lockstep::comm
