// The position of a loader as a StateDict: what a Loader saves and resumes.
#pragma once

#include "lockstep/checkpoint/stateful.h"
#include "lockstep/data/loader_position.h"

namespace lockstep::data {

/// Returns the fields as "seed", "epoch", "samples_drawn", "num_samples" and "shuffle". A seed above the largest signed
/// integer is stored as a negative number.
checkpoint::StateDict to_state_dict(const LoaderPosition& position);
/// Returns the position that to_state_dict() stored. Throws UsageError for missing or unknown names and for values of
/// another type.
LoaderPosition position_from_state_dict(const checkpoint::StateDict& state);

}  // namespace lockstep::data
