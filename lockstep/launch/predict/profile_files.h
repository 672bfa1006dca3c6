// The files in which the ranks of a program have recorded their steps (ddp/step_profile.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/launch/predict/step_model.h"

namespace lockstep::launcher::predict {

/// Returns the steps that these files, one of each rank, describe: the slowest rank's steps, and of each gradient the
/// shortest time until the end of backward(). Throws FormatError for a text that is not such a file. Pure.
StepProfile parse_profiles(const std::vector<std::string>& files);

}  // namespace lockstep::launcher::predict
