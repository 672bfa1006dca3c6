// SLURM's short forms of lists: "h[1-3,07-09],x5" of hosts, "2(x2),1" of counts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::job {

inline constexpr std::size_t kMaxNodes = 4096;

/// The hosts of `list` in its order, as `scontrol show hostnames` prints them: h1 h2 h3 h07 h08 h09 x5. A name may have
/// several brackets; the last one counts fastest. Names are letters, digits, '.', '_' and '-', do not begin with '-',
/// and have at most 255 characters.
///
/// Both throw UsageError naming `what` (the variable), the text and the column, for what is not of that form and for
/// more than kMaxNodes entries, before they are made.
std::vector<std::string> expand_hosts(std::string_view what, std::string_view list);

/// The counts of `text`, one a host: "2(x2),1" is 2, 2, 1.
std::vector<int> expand_counts(std::string_view what, std::string_view text);

}  // namespace lockstep::job
