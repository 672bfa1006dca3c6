// How `lockstep status` gets the reports of the launchers and agents on its host: it connects to their Unix sockets,
// and each of them replies with a file in memory. Writing such a file cannot block, however slow the reader is.
#pragma once

#include <sys/types.h>

#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/launch/protocol/status_messages.h"

namespace lockstep::launcher::protocol {

/// The prefix of the names of the sockets, for base::net::AbstractListener.
inline constexpr std::string_view kStatusSocketPrefix = "lockstep-status-";

/// Sends a report to a process that has connected. Does not block. Does nothing if that process has ended.
void send_job_status(int connection, const JobStatus& job);

/// Blocks until a report arrives on a connection. Throws Error kProtocol if it is invalid, and SystemError if the
/// sender closes the connection, with kJoinTimeout at the deadline.
JobStatus receive_job_status(int connection, base::Deadline deadline);

struct StatusReplies {
  std::vector<JobStatus> jobs;
  std::vector<pid_t> silent;  ///< launchers and agents without a valid reply
};
/// Requests a report from all launchers and agents of this user on this host. Blocks until all have replied or the
/// deadline expires. `socket_prefix` differs in tests.
StatusReplies request_job_status(base::Deadline deadline, std::string_view socket_prefix = kStatusSocketPrefix);

}  // namespace lockstep::launcher::protocol
