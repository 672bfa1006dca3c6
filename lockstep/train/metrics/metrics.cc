#include "lockstep/train/metrics/metrics.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "lockstep/base/error.h"

namespace lockstep::training::inline metrics {

namespace {

/// Returns the value of a tensor of one element. item() goes through the dispatcher, which takes microseconds per step
/// when a step's kernels have evicted its code and data from the caches.
double scalar_value(const at::Tensor& mean) {
  const bool is_plain_float =
      mean.scalar_type() == at::kFloat && mean.layout() == at::kStrided && !mean.is_neg() && !mean._is_zerotensor();
  return is_plain_float ? static_cast<double>(*mean.const_data_ptr<float>()) : mean.item<double>();
}

}  // namespace

Metrics::Entry& Metrics::find_or_add(const std::string& name, double count) {
  if (name.empty() || name.find('\n') != std::string::npos)
    throw base::UsageError("Metrics: the name \"" + name +
                           "\" is empty or has a line break; expected a name of one line");
  if (!(count > 0))
    throw base::UsageError("Metrics: " + name + " has the count " + std::to_string(count) + "; expected more than 0");
  return entries_[name];
}

void Metrics::add(const std::string& name, const at::Tensor& mean, double count) {
  if (!mean.defined() || mean.numel() != 1)
    throw base::UsageError(
        "Metrics: " + name + " is " +
        (mean.defined() ? "a tensor of " + std::to_string(mean.numel()) + " elements" : "an undefined tensor") +
        "; expected one element, the mean over samples");
  if (mean.is_cpu()) return add(name, scalar_value(mean), count);
  Entry& entry = find_or_add(name, count);
  const at::NoGradGuard no_grad;
  const at::Tensor value = mean.detach().reshape({}).to(at::kDouble);
  if (!entry.device_sum.defined())
    entry.device_sum = value * count;
  else
    entry.device_sum.add_(value.to(entry.device_sum.device()), count);
  entry.sum.count += count;
}

void Metrics::add(const std::string& name, double mean, double count) {
  Entry& entry = find_or_add(name, count);
  if (!std::isfinite(mean) &&
      std::find(non_finite_names_.begin(), non_finite_names_.end(), name) == non_finite_names_.end())
    non_finite_names_.push_back(name);
  entry.sum.sum += mean * count;
  entry.sum.count += count;
}

void Metrics::add(const std::map<std::string, Sum>& sums) {
  for (const auto& [name, sum] : sums) {
    Entry& entry = find_or_add(name, sum.count);
    entry.sum.sum += sum.sum;
    entry.sum.count += sum.count;
  }
}

std::map<std::string, Metrics::Sum> Metrics::sums() const {
  std::map<std::string, Sum> sums;
  for (const auto& [name, entry] : entries_) {
    sums[name] = entry.sum;
    if (entry.device_sum.defined()) sums[name].sum += entry.device_sum.item<double>();
  }
  return sums;
}

std::string to_text(const std::map<std::string, Metrics::Sum>& sums) {
  std::string text;
  for (const auto& [name, sum] : sums) {
    char numbers[64];
    std::snprintf(numbers, sizeof numbers, "%a %a ", sum.sum, sum.count);
    text += numbers + name + '\n';
  }
  return text;
}

std::map<std::string, Metrics::Sum> sums_from_text(const std::string& text) {
  std::map<std::string, Metrics::Sum> sums;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    Metrics::Sum sum;
    int end = 0;
    if (std::sscanf(line.c_str(), "%la %la %n", &sum.sum, &sum.count, &end) != 2 || end == 0 ||
        line.size() == static_cast<std::size_t>(end) || !(sum.count > 0) ||
        !sums.emplace(line.substr(static_cast<std::size_t>(end)), sum).second)
      throw base::FormatError("metrics:" + std::to_string(number) + ":1: \"" + line +
                              "\" is malformed; expected SUM COUNT NAME with a count above 0 and a unique name");
  }
  return sums;
}

NamedValues mean_over_ranks(const Metrics& metrics, const comm::Group& group) {
  std::map<std::string, Metrics::Sum> all;
  for (const std::string& text : group.all_gather_bytes(to_text(metrics.sums())))
    for (const auto& [name, sum] : sums_from_text(text)) {
      all[name].sum += sum.sum;
      all[name].count += sum.count;
    }
  NamedValues means;
  for (const auto& [name, sum] : all) means.emplace_back(name, sum.sum / sum.count);
  return means;
}

}  // namespace lockstep::training::inline metrics
