// Checks the LOCKSTEP_ variables that ranks will get, before any rank is started.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/process/environment.h"

namespace lockstep::launcher::plan {

/// Returns a warning for each LOCKSTEP_ variable that does not exist, with the most similar name that does. Throws a
/// UsageError that names the variable, its value and the values expected if a rank would refuse the value. Values that
/// only a rank can judge, such as whether a transport is part of its build, are not checked. Variables that begin with
/// LOCKSTEP_TEST_ are ignored. Pure.
std::vector<std::string> check_lockstep_variables(const process::Environment& environment);

}  // namespace lockstep::launcher::plan
