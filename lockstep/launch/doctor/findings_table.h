// The doctor's findings as text. Pure.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher {

/// "ok", "warn", "bad" or "unknown".
const char* severity_name(Severity severity);

/// For people: a line a finding, at most 80 columns where the words allow it, each remedy below its finding behind
/// "->"; last how many are bad.
std::string to_table(const std::vector<Finding>& findings);

/// One object: {"bad": N, "warn": N, "findings": [{"host", "check", "state", "value", "remedy"}]}, and a newline.
std::string to_json(const std::vector<Finding>& findings);

bool has_bad(const std::vector<Finding>& findings);

}  // namespace lockstep::launcher
