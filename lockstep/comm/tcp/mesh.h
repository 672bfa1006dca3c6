// The connections between the ranks of a group, each of which has proved that both ends have the job's key.
//
// Each rank listens at a port that the kernel chooses, and writes the port and a random number to the group's store.
// A rank connects to all ranks before it, once for each purpose:
//
// hello     (connects)  "LOCKMESH", u32 rank in the group, u8 purpose, nonce
// challenge (accepts)   nonce, proof
// proof     (connects)  proof
// admission (accepts)   one byte
//
// Nonces and proofs have 32 bytes; integers are little-endian. Each end proves that it has the job's key by a MAC of
// the hello, the random number from the store, the rank that accepts, and its nonce. A rank that is not admitted tries
// again.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/fd.h"
#include "lockstep/job/job_key.h"
#include "lockstep/job/store.h"

namespace lockstep::comm::tcp {

struct TcpOptions {
  std::shared_ptr<job::Store> store = nullptr;  ///< used by this group alone
  job::JobKey key = {};                         ///< of the job; unset: any process that reads the store is a rank
  std::vector<int> members = {};                ///< world ranks
  int rank = 0;                                 ///< index of this rank in `members`
  std::string address = {};                     ///< numeric address of this host
  std::string interface = {};                   ///< network interface; if not empty, `address` is not used
  std::chrono::milliseconds timeout{};          ///< for connecting
  /// Whether a thread of the transport sends and receives. If not, two switches between threads are saved for each
  /// message, but operations make progress only in start(), done() and wait_until(): until then, other ranks wait for
  /// the rest of a large message, and a connection that has ended goes unnoticed. connect_mesh() ignores it.
  bool has_thread = true;
};

/// What a connection between two ranks carries.
enum Purpose : std::uint8_t {
  kCollectives,
  kMessagesUp,    ///< what the lower rank sends by send(), and the answers
  kMessagesDown,  ///< what the higher rank sends
  kNumPurposes
};
/// The connections to one other rank, by purpose. All are empty for this rank itself.
using PeerSockets = std::array<base::Fd, kNumPurposes>;

/// Connects all ranks; blocks until those of this rank are connected. Another process may send the bytes of a hello and
/// a proof and stay for 2 s, and gets at most a challenge; 64 such connections are kept beside those of the ranks.
/// Returns the connections by rank in the group; no port is open afterwards. Throws CommError if a rank does not
/// connect in time, UsageError if `interface` cannot be used, and SystemError if `address` cannot be used or the
/// process may not have so many descriptors: three per rank.
std::vector<PeerSockets> connect_mesh(const TcpOptions& options);

}  // namespace lockstep::comm::tcp
