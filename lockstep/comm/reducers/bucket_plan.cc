#include "lockstep/comm/reducers/bucket_plan.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "lockstep/base/log.h"

namespace lockstep::comm::reducers {
namespace {

constexpr std::int64_t kMeasuredBytes[] = {256 << 10, 1 << 20, 4 << 20, 10 << 20, 25 << 20};
constexpr std::int64_t kMaxFirstBucketBytes = 1 << 20;  // the first bucket should start early
constexpr int kRuns = 3;                                // after a warm-up run
constexpr double kMaxSeconds = 0.2;                     // stop after a size that takes longer
constexpr double kGoodRate = 0.9;                       // fraction of the best rate

void all_reduce(channel::Channel& channel, const at::Tensor& tensor, ReduceOp op) {
  Collective all{
      .kind = CollectiveKind::kAllReduce, .name = "bucket size", .input = tensor, .output = tensor, .op = op};
  channel.begin(all, tensor);
  channel.run(all, "the measurement of bucket sizes");
  channel.end(all.flight_id);
  channel.synchronize();
}

/// Returns the maximum over the ranks of their median times, which is the same on all ranks.
double measure_all_reduce(channel::Channel& channel, const at::Tensor& tensor) {
  double seconds[kRuns];
  all_reduce(channel, tensor, ReduceOp::kSum);
  for (double& second : seconds) {
    const auto begin = std::chrono::steady_clock::now();
    all_reduce(channel, tensor, ReduceOp::kSum);
    second = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  std::sort(seconds, seconds + kRuns);
  const at::Tensor slowest = at::full({1}, seconds[kRuns / 2], at::kDouble);
  all_reduce(channel, slowest, ReduceOp::kMax);
  return slowest.item<double>();
}

std::string text_of(const BucketTime& time) {
  char text[64];
  std::snprintf(text, sizeof text, "%lld KiB %.2f ms", static_cast<long long>(time.bytes >> 10), time.seconds * 1e3);
  return text;
}

}  // namespace

std::int64_t choose_bucket_bytes(const std::vector<BucketTime>& times) {
  const auto rate = [](const BucketTime& time) { return static_cast<double>(time.bytes) / time.seconds; };
  double best = 0;
  for (const BucketTime& time : times) best = std::max(best, rate(time));
  for (const BucketTime& time : times)
    if (rate(time) >= kGoodRate * best) return time.bytes;
  return times.back().bytes;
}

std::vector<std::int64_t> measure_bucket_bytes(channel::Channel& channel, at::Device device) {
  std::vector<BucketTime> times;
  std::string measured;
  for (const std::int64_t bytes : kMeasuredBytes) {
    const at::Tensor tensor = at::zeros({bytes / 4}, at::TensorOptions(device).dtype(at::kFloat));
    times.push_back({bytes, measure_all_reduce(channel, tensor)});
    measured += (measured.empty() ? "" : ", ") + text_of(times.back());
    if (times.back().seconds > kMaxSeconds) break;
  }
  const std::int64_t chosen = choose_bucket_bytes(times);
  if (channel.rank() == 0)
    base::log_info("buckets of " + std::to_string(chosen >> 10) + " KiB; an all_reduce took: " + measured);
  return {std::min(chosen, kMaxFirstBucketBytes), chosen};
}

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
