// Expands SLURM's compressed lists of hosts ("h[1-3,07-09],x5") and counts ("2(x2),1").
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::job::identity {

inline constexpr std::size_t kMaxNodes = 4096;

/// Returns the hosts of `list` in its order, as `scontrol show hostnames` prints them: h1 h2 h3 h07 h08 h09 x5. A name
/// may have several brackets; the last one varies fastest. Names consist of letters, digits, '.', '_' and '-', do not
/// start with '-', and have at most 255 characters.
///
/// Throws a UsageError that names `what` (the variable), the text and the column if `list` does not have this form or
/// has more than kMaxNodes entries, which it detects before it expands them.
std::vector<std::string> expand_hosts(std::string_view what, std::string_view list);

/// Returns the counts of `text`, one per host: 2, 2, 1 for "2(x2),1". Throws the same errors as expand_hosts().
std::vector<int> expand_counts(std::string_view what, std::string_view text);

}  // namespace lockstep::job::identity
