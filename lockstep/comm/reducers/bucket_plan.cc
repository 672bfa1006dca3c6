#include "lockstep/comm/reducers/bucket_plan.h"

#include <algorithm>
#include <map>

namespace lockstep::comm::reducers {

std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<GradientSize>& gradients,
                                                   const std::vector<std::size_t>& order,
                                                   const std::vector<std::int64_t>& caps) {
  struct OpenBucket {
    std::vector<std::size_t> members;
    std::int64_t bytes = 0;
    std::size_t last = 0;  // position of the last member in `order`
  };
  std::vector<OpenBucket> closed;
  std::map<int, OpenBucket> open;
  std::map<int, int> count;
  for (std::size_t position = 0; position < order.size(); ++position) {
    const GradientSize& gradient = gradients[order[position]];
    OpenBucket& bucket = open[gradient.kind];
    bucket.members.push_back(order[position]);
    bucket.bytes += gradient.bytes;
    bucket.last = position;
    const std::int64_t cap = count[gradient.kind] == 0 ? caps.front() : caps.back();
    if (bucket.bytes < cap) continue;
    closed.push_back(std::move(bucket));
    open.erase(gradient.kind);
    ++count[gradient.kind];
  }
  for (auto& [kind, bucket] : open) closed.push_back(std::move(bucket));
  std::sort(closed.begin(), closed.end(), [](const OpenBucket& a, const OpenBucket& b) { return a.last < b.last; });
  std::vector<std::vector<std::size_t>> buckets;
  for (OpenBucket& bucket : closed) buckets.push_back(std::move(bucket.members));
  return buckets;
}

std::vector<std::size_t> merge_orders(const std::vector<std::vector<std::size_t>>& orders, std::size_t num_gradients) {
  std::vector<std::size_t> agreed;
  std::vector<bool> seen(num_gradients, false);
  for (const auto& order : orders)
    for (const std::size_t index : order)
      if (index < num_gradients && !seen[index]) {
        seen[index] = true;
        agreed.push_back(index);
      }
  return agreed;
}

}  // namespace lockstep::comm::reducers
