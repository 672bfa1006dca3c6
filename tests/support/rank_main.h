// Support for tests that run on every rank of a job: lockstep_rank_tests() in tests/conformance starts one program as
// all ranks. rank_main.cc is its main().
#pragma once

#include "lockstep/comm/group.h"

namespace lockstep::tests {

/// Returns the group of all ranks. main() joins it before the first test and leaves it after the last. All ranks run
/// the same tests in the same order, so a test may call collectives.
const comm::Group& world();

/// Leaves the world before main() does, to test how the program and the other ranks behave afterwards. world() must not
/// be called after this.
void leave_world();

}  // namespace lockstep::tests
