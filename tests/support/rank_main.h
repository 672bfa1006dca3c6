// Tests that run as every rank of a job: lockstep_rank_tests() in tests/conformance starts one binary as all of them.
#pragma once

#include "lockstep/comm/group.h"

namespace lockstep::tests {

/// The group of all ranks. main() of these binaries joins before the first test and leaves after the last; every rank
/// runs the same tests in the same order, so a test may call anything that all ranks must call.
comm::Group& world();

/// Leaves the world before main() does: for tests of what the other ranks see then. world() must not be called after
/// it.
void leave_world();

}  // namespace lockstep::tests
