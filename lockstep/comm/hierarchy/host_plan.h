// Who shares a host with whom, and who exchanges what with whom between hosts. Pure.
#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::comm {

/// Members are numbered 0.. as in their group. Hosts are numbered as their first members come; local places count the
/// members of a host. A column is the members with the same local place, one on each host: there are as many as the
/// smallest host has members, and only members of a column exchange data between hosts. So every byte crosses once for
/// each host, whatever the order of members is.
struct HostPlan {
  struct Location {
    int host = 0;
    int local_rank = 0;
  };
  std::vector<std::vector<int>> hosts;  ///< the members of each host, ascending
  std::vector<Location> locations;      ///< of each member
  int num_cross_host_groups = 0;
  std::size_t max_host_size = 0;  ///< members of the largest host

  /// The members of column `column`, host by host.
  std::vector<int> cross_host_group(int cross_host_group) const;
};

/// `host_of[m]` is any number that is the same for members of one host.
HostPlan plan_hosts(const std::vector<int>& host_of);

/// A run of elements.
struct Slice {
  std::size_t first = 0;
  std::size_t count = 0;
};
/// What column `column` of `num_cross_host_groups` exchanges of `count` elements. The slices follow each other, begin
/// on multiples of 64, and cover all.
Slice slice_of(std::size_t count, int num_cross_host_groups, int cross_host_group);

}  // namespace lockstep::comm
