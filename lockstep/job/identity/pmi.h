// A client of PMI-1, the protocol between MPICH's launcher (Hydra) and its ranks: lines of text over an inherited
// descriptor.
#pragma once

#include <string>
#include <string_view>

#include "lockstep/base/deadline.h"

namespace lockstep::job::identity {

/// Returns the `text` of rank 0 on all ranks. Every rank must call it once. `text` must have at most 400 bytes. `fd` is
/// the value of PMI_FD; the caller keeps ownership. The launcher transmits the text unencrypted.
///
/// Blocks until all ranks have called it. Ends the PMI session before it returns, so that the launcher treats ranks
/// that exit later as finished. An MPI library in this process cannot use the descriptor afterwards.
///
/// Throws CommError: kJoinTimeout if not all ranks call it before `deadline`, kCoordinatorLost if the launcher has
/// ended, kProtocol for a line that is not PMI-1 or longer than 4096 bytes.
std::string pmi_broadcast(int fd, int rank, std::string_view text, base::Deadline deadline);

/// Returns the value of `name` in "cmd=... name=value ...", or "" if it is missing.
std::string pmi_field(std::string_view line, std::string_view name);

}  // namespace lockstep::job::identity
