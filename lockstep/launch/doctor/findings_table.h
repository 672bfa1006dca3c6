// The doctor's findings as text. Pure.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher {

/// "ok", "warn", "bad" or "unknown".
const char* severity_name(Severity severity);

/// A table with one line per finding, at most 80 columns if the words allow it; each remedy is below its finding after
/// "->", and the last line has the counts.
std::string to_table(const std::vector<Finding>& findings);

/// One JSON object and a newline: {"bad": N, "warn": N, "findings": [{"host", "check", "state", "value", "remedy"}]}.
std::string to_json(const std::vector<Finding>& findings);

bool has_bad(const std::vector<Finding>& findings);

}  // namespace lockstep::launcher
