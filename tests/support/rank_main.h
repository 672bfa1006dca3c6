// Support for tests that run on every rank of a job: lockstep_rank_tests() in tests/conformance starts one binary as
// all ranks.
#pragma once

#include "lockstep/comm/group.h"

namespace lockstep::tests {

/// Returns the group of all ranks. main() of these binaries joins before the first test and leaves after the last. All
/// ranks run the same tests in the same order, so a test may call collectives.
comm::Group& world();

/// Leaves the world before main() does, for tests of what the other ranks observe then. world() must not be called
/// afterwards.
void leave_world();

}  // namespace lockstep::tests
