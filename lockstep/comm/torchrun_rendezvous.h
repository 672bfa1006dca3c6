// Exchanges rank 0's address through the c10d store that torchrun serves for its ranks.
#pragma once

#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::comm {

/// Rank 0 stores `message` under `key` in the c10d TCPStore at `address`; all other ranks pass "" and read it. Every
/// rank returns the message. Returns or throws at most one second after the deadline, even if c10d itself blocks.
/// Throws CommError kCoordinatorLost if the store does not answer, kJoinTimeout if rank 0 has stored no message.
std::string exchange_over_torchrun_store(const base::net::Address& address, const std::string& key,
                                         const std::string& message, base::Deadline deadline);

}  // namespace lockstep::comm
