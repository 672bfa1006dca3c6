#include "lockstep/comm/reducers/bucket_plan.h"

#include <algorithm>
#include <map>

namespace lockstep::comm {

std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<GradientSize>& parts,
                                                   const std::vector<std::size_t>& order,
                                                   const std::vector<std::int64_t>& caps) {
  struct Open {
    std::vector<std::size_t> members;
    std::int64_t bytes = 0;
    std::size_t last = 0;  // place of the last member in `order`
  };
  std::vector<Open> closed;
  std::map<int, Open> open;
  std::map<int, int> count;
  for (std::size_t place = 0; place < order.size(); ++place) {
    const GradientSize& part = parts[order[place]];
    Open& bucket = open[part.kind];
    bucket.members.push_back(order[place]);
    bucket.bytes += part.bytes;
    bucket.last = place;
    const std::int64_t cap = count[part.kind] == 0 ? caps.front() : caps.back();
    if (bucket.bytes < cap) continue;
    closed.push_back(std::move(bucket));
    open.erase(part.kind);
    ++count[part.kind];
  }
  for (auto& [kind, bucket] : open) closed.push_back(std::move(bucket));
  std::sort(closed.begin(), closed.end(), [](const Open& a, const Open& b) { return a.last < b.last; });
  std::vector<std::vector<std::size_t>> buckets;
  for (Open& bucket : closed) buckets.push_back(std::move(bucket.members));
  return buckets;
}

std::vector<std::size_t> merge_orders(const std::vector<std::vector<std::size_t>>& orders, std::size_t num_gradients) {
  std::vector<std::size_t> agreed;
  std::vector<bool> seen(num_gradients, false);
  for (const auto& order : orders)
    for (const std::size_t part : order)
      if (part < num_gradients && !seen[part]) {
        seen[part] = true;
        agreed.push_back(part);
      }
  return agreed;
}

}  // namespace lockstep::comm
