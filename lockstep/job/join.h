// Coming together: everybody is there, nobody twice, and all run the same thing.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/job/store.h"

namespace lockstep::job {

/// Values that must be equal on all ranks: "lockstep", "libtorch", "libtorch_cpu", "program". join() adds "world_size";
/// the store's own hello has compared the protocol.
using Facts = std::map<std::string, std::string>;

/// Waits for all ranks and fills what `identity` was not told (local rank and so on). Ends early when another rank has
/// published why it gave up. On every rank throws
///   CommError kJoinTimeout     at the deadline, listing by number who did not come;
///   UsageError                 when this rank's number has joined before, naming both hosts and pids;
///   CommError kConfigMismatch  when a fact differs, naming the rank, the key and both values.
void join(Store& store, Identity& identity, const Facts& facts, base::Deadline deadline);

/// The name of the host that `rank` has joined from; "?" before it has.
std::string find_host_of_rank(Store& store, int rank);

/// This start of this machine, its network, its folder of temporary files and the name that it was given
/// (LOCKSTEP_HOST_ID), as this process sees them: what has one of its own counts as a host.
std::string host_id();

/// The GNU build id of the loaded library that is called `library` ("libc.so.6"), of the running program for "", as
/// hex; "-" when there is none.
std::string build_id(const std::string& library);

}  // namespace lockstep::job
