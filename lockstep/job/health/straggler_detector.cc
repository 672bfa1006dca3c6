#include "lockstep/job/health/straggler_detector.h"

#include <algorithm>
#include <cstdio>

namespace lockstep::job::health {
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
  const std::uint64_t most = *std::ranges::max_element(sums_);
  if (++num_reductions_ < kWindow || most < kWindowUs) return std::nullopt;
  const auto found = add_window(sums_);
  std::ranges::fill(sums_, 0);
  num_reductions_ = 0;
  return found;
}

std::optional<Straggler> StragglerDetector::add_window(const std::vector<std::uint64_t>& work) {
  std::vector<std::uint64_t> sorted = work;
  // With an even number of ranks the lower median, so that one of two ranks can be slow.
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((sorted.size() - 1) / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  const auto median = std::max(1.0, static_cast<double>(*middle));
  const auto most = static_cast<double>(*std::ranges::max_element(work));
  std::optional<Straggler> found;
  for (std::size_t rank = 0; rank < work.size(); ++rank) {
    const double slowdown = static_cast<double>(work[rank]) / median;
    if (slowdown < kSlowdownFactor)
      slow_windows_[rank] = 0;
    else if (++slow_windows_[rank] == kWindowsInARow)
      found = Straggler{static_cast<int>(rank), slowdown, 1 - median / most};
  }
  return found;
}

Fatal warning_of(const Straggler& straggler, int rank) {
  char detail[160];
  std::snprintf(detail, sizeof detail,
                "it takes %.1f times as long as the median rank, and the other ranks wait for it %.0f %% of the time",
                straggler.slowdown, straggler.wait_share * 100);
  return {.cause = base::Cause::kStraggler,
          .rank = rank,
          .detail = detail,
          .hint = "look for other work on its cores, a slower machine or larger batches there; the job continues"};
}

}  // namespace lockstep::job::health
