// Scalars with names.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace lockstep::training::inline loggers {

/// Displayed and written in this order: {"loss", 1.482}, {"acc", 0.551}.
using NamedValues = std::vector<std::pair<std::string, double>>;

}  // namespace lockstep::training::inline loggers
