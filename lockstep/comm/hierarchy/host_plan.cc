#include "lockstep/comm/hierarchy/host_plan.h"

#include <algorithm>

namespace lockstep::comm::hierarchy {
namespace {

constexpr std::size_t kSliceAlignment = 64;  // in elements, so that slices begin at cache lines

}  // namespace

std::vector<int> HostPlan::cross_host_group(int cross_host_group) const {
  std::vector<int> members;
  for (const auto& host : hosts) members.push_back(host[static_cast<std::size_t>(cross_host_group)]);
  return members;
}

HostPlan plan_hosts(const std::vector<int>& host_of) {
  HostPlan plan;
  std::vector<int> numbers;  // the caller's number of each host
  for (std::size_t member = 0; member < host_of.size(); ++member) {
    const auto found = std::find(numbers.begin(), numbers.end(), host_of[member]);
    const auto host = static_cast<std::size_t>(found - numbers.begin());
    if (found == numbers.end()) {
      numbers.push_back(host_of[member]);
      plan.hosts.emplace_back();
    }
    plan.locations.push_back({static_cast<int>(host), static_cast<int>(plan.hosts[host].size())});
    plan.hosts[host].push_back(static_cast<int>(member));
  }
  const auto smaller = [](const auto& a, const auto& b) { return a.size() < b.size(); };
  plan.num_cross_host_groups =
      static_cast<int>(std::min_element(plan.hosts.begin(), plan.hosts.end(), smaller)->size());
  plan.max_host_size = std::max_element(plan.hosts.begin(), plan.hosts.end(), smaller)->size();
  return plan;
}

ElementRange slice_of(std::size_t count, int num_cross_host_groups, int cross_host_group) {
  const auto num_groups = static_cast<std::size_t>(num_cross_host_groups);
  const std::size_t step =
      ((count + num_groups - 1) / num_groups + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment;
  const std::size_t first = std::min(count, static_cast<std::size_t>(cross_host_group) * step);
  return {first, std::min(step, count - first)};
}

NeededElements share_of(const NeededElements& needed, int num_cross_host_groups, int cross_host_group) {
  NeededElements share;
  for (const std::vector<ElementRange>& ranges : needed) {
    std::size_t count = 0;
    for (const ElementRange& range : ranges) count += range.count;
    const ElementRange slice = slice_of(count, num_cross_host_groups, cross_host_group);
    std::vector<ElementRange>& own = share.emplace_back();
    for_each_piece(ranges, slice.first, slice.first + slice.count,
                   [&](std::size_t first, std::size_t piece, std::size_t) { own.push_back({first, piece}); });
  }
  return share;
}

}  // namespace lockstep::comm::hierarchy
