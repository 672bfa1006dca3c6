// Joins a job: waits until all ranks have joined, rejects duplicate ranks, checks that all run the same program, and
// compares their arguments.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/job/store.h"

namespace lockstep::job {

/// Named values that must be equal on all ranks: "lockstep", "libtorch", "libtorch_cpu", "program". join() adds
/// "world_size". Their protocol versions are equal: the store's handshake compares them.
using Facts = std::map<std::string, std::string>;

/// Blocks until all ranks have joined, and fills in the unknown members of `identity` (local rank and so on). Throws on
/// every rank:
///   CommError kJoinTimeout     at the deadline, listing the missing ranks;
///   UsageError                 if a rank joins twice, naming the hosts and pids of both processes;
///   CommError kConfigMismatch  if a fact differs, naming the rank, the key and both values;
///   CommError                  with the first cause, as soon as another rank has published one.
/// Logs a warning if the command line arguments of ranks differ.
void join(Store& store, identity::Identity& identity, const Facts& facts, base::Deadline deadline);

/// Returns the name of the host from which `rank` has joined, or "?" if it has not joined. Blocks as Store::find()
/// does. Throws CommError kCoordinatorLost.
std::string find_host_of_rank(Store& store, int rank);

/// Returns an identifier of this host as this process sees it: boot id, user, namespaces of the network and of users,
/// /tmp, and LOCKSTEP_HOST_ID. join() treats processes with different identifiers as processes on different hosts.
std::string host_id();

/// Returns the GNU build id, in hexadecimal, of the loaded library with the file name `library` ("libc.so.6"), or of
/// the running program if `library` is empty. Returns "-" if there is none.
std::string build_id(const std::string& library);

/// Returns the arguments of this process, beginning with the program's name. Returns none if the kernel does not
/// provide them.
std::vector<std::string> own_arguments();

/// Returns the arguments in `command_line`, which begins with the program's name, without that name: at most 64, each
/// truncated to 100 bytes, with control characters replaced by spaces. Omits arguments that differ between ranks by
/// design: those that contain "rank" ("--local-rank=3"), and the argument after such a one if it has no "="
/// ("--rank 3").
std::vector<std::string> comparable_arguments(std::vector<std::string> command_line);

/// Describes the first difference between `theirs` and `first`: `"--lr" "0.2" instead of "--lr" "0.1"`. Each side has
/// the argument before the difference and at most two from the difference on. Returns "" if the arguments are equal.
std::string argument_difference(const std::vector<std::string>& theirs, const std::vector<std::string>& first);

}  // namespace lockstep::job
