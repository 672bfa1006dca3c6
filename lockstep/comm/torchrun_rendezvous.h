// Where ranks that torchrun started meet: a word of rank 0 in the store that torchrun keeps for them.
#pragma once

#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::comm {

/// Through the c10d TCPStore at `address`: rank 0 leaves `word` under `key`, all others give "" and get it. Ends a
/// second after the deadline at the latest, whatever c10d waits for. Throws CommError kCoordinatorLost when that store
/// does not answer, kJoinTimeout when rank 0 has left no word.
std::string exchange_over_torchrun_store(const base::Address& address, const std::string& key,
                                         const std::string& message, base::Deadline deadline);

}  // namespace lockstep::comm
