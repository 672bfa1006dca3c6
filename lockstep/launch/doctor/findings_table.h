// Formats the doctor's findings as a table or as JSON. Pure.
#pragma once

#include <string>
#include <vector>

#include "lockstep/launch/doctor/diagnosis.h"

namespace lockstep::launcher::doctor {

/// Returns "ok", "warn", "bad" or "unknown".
const char* severity_name(Severity severity);

/// Returns a table with one line per finding. Each remedy is below its finding, after "->"; the last line has the
/// counts. Lines have at most 80 columns unless a word is longer.
std::string to_table(const std::vector<Finding>& findings);

/// Returns one JSON object and a newline: {"bad": N, "warn": N, "findings": [{"host", "check", "state", "value",
/// "remedy"}]}.
std::string to_json(const std::vector<Finding>& findings);

/// Returns whether a finding is kBad.
bool has_bad(const std::vector<Finding>& findings);

}  // namespace lockstep::launcher::doctor
