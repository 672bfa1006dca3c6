// PMI-1, the protocol in which MPICH's launcher (hydra) answers the ranks that it has started: lines of text over an
// inherited descriptor.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"

namespace lockstep::job {

/// `text` of rank 0, on all ranks; all of them call it, once. `fd` is PMI_FD, and stays the caller's. The launcher
/// carries the text as it is. At most 400 bytes.
///
/// The session is ended before it returns, so that the launcher takes a rank that ends later for one that has done its
/// work; an MPI library in this process cannot use the descriptor afterwards.
///
/// Throws CommError kJoinTimeout when not all ranks come before `deadline`, kCoordinatorLost when the launcher is gone,
/// kProtocol for lines that are not of PMI-1 or longer than 4096 bytes.
std::string pmi_broadcast(int fd, int rank, std::string_view text, base::Deadline deadline);

/// The value of `name` in "cmd=... name=value ..."; "" when it is not there.
std::string pmi_field(std::string_view line, std::string_view name);

}  // namespace lockstep::job
