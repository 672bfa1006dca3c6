// The assignment of the members of a group to hosts and to cross-host groups. Pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "lockstep/comm/interface/collective.h"

namespace lockstep::comm::hierarchy {

/// Members are numbered from 0 as in their group. Hosts are numbered in the order of their first members. A local rank
/// is the index of a member on its host. A cross-host group consists of the members with the same local rank, one per
/// host. There are as many of these groups as the smallest host has members, and only their members exchange data
/// between hosts. So each byte is sent once per host, however the members are ordered.
struct HostPlan {
  struct Location {
    int host = 0;
    int local_rank = 0;
  };
  std::vector<std::vector<int>> hosts;  ///< the members of each host, ascending
  std::vector<Location> locations;      ///< of each member
  int num_cross_host_groups = 0;
  std::size_t max_host_size = 0;  ///< the number of members of the largest host

  /// The members of cross-host group number `cross_host_group`, in the order of the hosts.
  std::vector<int> cross_host_group(int cross_host_group) const;
};

/// Returns the plan for members on the hosts `host_of`: host_of[m] identifies the host of member m by an arbitrary
/// number.
HostPlan plan_hosts(const std::vector<int>& host_of);

/// Returns the slice of `count` elements that one of `num_cross_host_groups` groups exchanges. The slices are
/// contiguous, begin at multiples of 64, and cover all elements.
ElementRange slice_of(std::size_t count, int num_cross_host_groups, int cross_host_group);

/// Calls use(first, count, place) for each piece of the elements [begin, end) of the ranges, which are counted as if
/// they followed each other. `place` is counted from `begin`.
template <typename Use>
void for_each_piece(const std::vector<ElementRange>& ranges, std::size_t begin, std::size_t end, const Use& use) {
  std::size_t before = 0;
  for (const ElementRange& range : ranges) {
    const std::size_t from = std::max(begin, before), to = std::min(end, before + range.count);
    if (from < to) use(range.first + from - before, to - from, from - begin);
    before += range.count;
  }
}
/// Returns the part of each host's elements that one of `num_cross_host_groups` groups exchanges, as slice_of() divides
/// them.
NeededElements share_of(const NeededElements& needed, int num_cross_host_groups, int cross_host_group);

}  // namespace lockstep::comm::hierarchy
