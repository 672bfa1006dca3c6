#include "lockstep/comm/reducers/straggler_detector.h"

#include <algorithm>
#include <cstdio>

#include "lockstep/job/fatal.h"

namespace lockstep::comm::reducers {
namespace {

constexpr int kWindow = 20;
constexpr std::uint64_t kWindowUs = 1'000'000;
constexpr int kWindowsInARow = 3;
constexpr double kSlowdownFactor = 3;

}  // namespace

StragglerDetector::StragglerDetector(int ranks)
    : sums_(static_cast<std::size_t>(ranks)), slow_windows_(static_cast<std::size_t>(ranks)) {}

std::optional<Straggler> StragglerDetector::add(const std::vector<std::uint32_t>& work_us) {
  for (std::size_t rank = 0; rank < sums_.size(); ++rank) sums_[rank] += work_us[rank];
  const std::uint64_t most = *std::max_element(sums_.begin(), sums_.end());
  if (++num_reductions_ < kWindow || most < kWindowUs) return std::nullopt;
  std::vector<std::uint64_t> sorted = sums_;
  // With an even number of ranks the lower median, so that one of two ranks can be slow.
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((sorted.size() - 1) / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  const auto median = std::max(1.0, static_cast<double>(*middle));
  std::optional<Straggler> found;
  for (std::size_t rank = 0; rank < sums_.size(); ++rank) {
    const double slowdown = static_cast<double>(sums_[rank]) / median;
    if (slowdown < kSlowdownFactor)
      slow_windows_[rank] = 0;
    else if (++slow_windows_[rank] == kWindowsInARow)
      found = Straggler{static_cast<int>(rank), slowdown, 1 - median / static_cast<double>(most)};
  }
  std::fill(sums_.begin(), sums_.end(), 0);
  num_reductions_ = 0;
  return found;
}

std::string describe(const Straggler& straggler, int rank, int generation, std::int64_t step) {
  char detail[160];
  std::snprintf(detail, sizeof detail,
                "it takes %.1f times as long as the median rank, and the other ranks wait for it %.0f %% of the time",
                straggler.slowdown, straggler.wait_share * 100);
  return job::format_warning(
      {.cause = base::Cause::kStraggler,
       .rank = rank,
       .gen = generation,
       .step = step,
       .detail = detail,
       .hint = "look for other work on its cores, a slower machine or larger batches there; the job continues"});
}

}  // namespace lockstep::comm::reducers
