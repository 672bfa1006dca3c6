#include "lockstep/launch/predict/step_model.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace lockstep::launcher::predict {
namespace {

// The default of DdpOptions.bucket_bytes.
constexpr double kFirstBucketBytes = 1 << 20, kBucketBytes = 25 << 20;
// Messages of an operation between hosts and between the threads of a host, without the link's latency.
constexpr double kOperationS = 150e-6;
constexpr double kPhases = 2;  // of an all-reduce: scatter, gather
// Operations that end each reduction: the headers, and which gradients are there.
constexpr double kSmallOperations = 2;
// CPU time per parameter, of all ranks of a host together: encoding, decoding, error feedback and the outer step.
constexpr double kDiLoCoS = 8e-9, kSparseLoCoS = 14e-9, kAverageS = 2e-9, kInt8S = 5e-9;
constexpr double kPowerSgdS = 5e-9;  // of each rank
constexpr double kPowerSgdRank = 4;
// Payload of a parameter: int8 with a scale for 256 of them; 64 of 4096 with their indices and signs.
constexpr double kInt8Bytes = 260.0 / 256, kSparseBytes = 116.0 / 4096;
// Passes over memory that an exchange between hosts needs beyond one within the host.
constexpr double kMemoryPasses = 3;
constexpr double kModelError = 0.12, kErrorPerDoubling = 0.03;
constexpr int kComparedHosts = 4;
constexpr int kResamples = 400;
constexpr int kRounds = 40;         // of each
constexpr int kMaxDrawnHosts = 64;  // the maximum of more grows slowly

/// Bytes that each host sends, and receives, for an all-reduce of `bytes`.
double reduced_bytes(double bytes, int hosts) { return 2 * bytes * (hosts - 1) / hosts; }

double num_parameters(const HostProfile::Model& model) {
  double number = 0;
  for (const Gradient& gradient : model.gradients) number += gradient.rows * gradient.columns;
  return number;
}

/// What a host sends of a gradient.
double payload(const Gradient& gradient, Method method) {
  if (method == Method::kBfloat16) return gradient.is_float32 ? gradient.bytes / 2 : gradient.bytes;
  const double number = gradient.rows * gradient.columns;
  if (method == Method::kInt8) return number * kInt8Bytes;
  if (method != Method::kPowerSgd) return gradient.bytes;
  const double factors = kPowerSgdRank * (gradient.rows + gradient.columns);
  return 4 * (2 * factors >= number ? number : factors / 2);  // as PowerSgdHook; one of the two factors in each step
}

struct Exchange {
  double exposed_s = 0;  // after the end of backward()
  double cpu_s = 0;      // of a rank, during backward() and after it
  double bytes = 0;
};

/// Replays the buckets of one backward(), whose end is at time 0.
Exchange replay(const HostProfile& profile, const HostProfile::Model& model, const HostCosts& costs,
                const Cluster& cluster, Method method) {
  Exchange exchange;
  double free_at = -1e9, sent = 0, encoded = 0, capacity = kFirstBucketBytes, full = 0;
  const double ranks = profile.ranks;
  const auto run_bucket = [&](double ready_at) {
    const double bytes = reduced_bytes(sent, cluster.hosts);
    const double cpu =
        (bytes * costs.wire_s_per_byte + kMemoryPasses * full * costs.memory_s_per_byte + kInt8S * encoded) / ranks;
    const double fixed = kPhases * (cluster.latency_s + kOperationS);
    free_at = std::max(free_at, ready_at) + std::max(bytes / cluster.bytes_per_s, cpu) + fixed;
    exchange.bytes += bytes;
    exchange.cpu_s += cpu;
    capacity = kBucketBytes;
    sent = full = encoded = 0;
  };
  for (const Gradient& gradient : model.gradients) {
    sent += payload(gradient, method);
    full += gradient.bytes;
    if (method == Method::kInt8) encoded += gradient.rows * gradient.columns;
    if (full >= capacity) run_bucket(-gradient.lead_s);
  }
  if (full > 0) run_bucket(model.gradients.empty() ? 0 : -model.gradients.back().lead_s);
  free_at = std::max(free_at, 0.0) + kSmallOperations * kPhases * (cluster.latency_s + kOperationS);
  if (method == Method::kPowerSgd) exchange.cpu_s += kPowerSgdS * num_parameters(model);
  // The exchange takes the CPU from the computation, which then ends later and waits for less.
  const double taken = costs.shares_cores || method == Method::kPowerSgd ? exchange.cpu_s : 0;
  exchange.exposed_s = std::max(free_at, taken);
  return exchange;
}

/// What a round of a method for slow networks takes.
Exchange round(const HostProfile& profile, const HostCosts& costs, const Cluster& cluster, Method method) {
  Exchange exchange;
  for (const HostProfile::Model& model : profile.models) {
    const double parameters = num_parameters(model);
    double parameter_bytes = 0;
    for (const Gradient& gradient : model.gradients) parameter_bytes += gradient.bytes;
    const bool sparse = method == Method::kSparseLoCo;
    const double dense = method == Method::kAverage ? parameter_bytes : parameters * kInt8Bytes;
    const double bytes = sparse ? (cluster.hosts - 1) * parameters * kSparseBytes : reduced_bytes(dense, cluster.hosts);
    const double codec = sparse ? kSparseLoCoS : method == Method::kAverage ? kAverageS : kDiLoCoS;
    exchange.cpu_s += codec * parameters + bytes * costs.wire_s_per_byte;
    exchange.bytes += bytes;
    exchange.exposed_s += kPhases * (cluster.latency_s + kOperationS);
  }
  exchange.cpu_s /= profile.ranks;
  exchange.exposed_s += std::max(exchange.bytes / cluster.bytes_per_s, exchange.cpu_s);
  // Sending overlaps with the encoding of other parts only in part; half of it is assumed.
  exchange.exposed_s += std::min(exchange.bytes / cluster.bytes_per_s, exchange.cpu_s) / 2;
  return exchange;
}

/// The mean over steps of the slowest of `hosts` hosts, if they wait for each other every `every` steps. The mean of
/// many draws is drawn itself, from a normal distribution.
double slowest_of(const std::vector<double>& steps, int hosts, int every, std::mt19937& random) {
  std::uniform_int_distribution<std::size_t> pick(0, steps.size() - 1);
  const double mean = average_of(steps);
  double squares = 0;
  for (const double step : steps) squares += (step - mean) * (step - mean);
  const double deviation = std::sqrt(squares / static_cast<double>(steps.size()) / every);
  std::normal_distribution<double> draw_mean(mean, std::max(deviation, 1e-12));
  double sum = 0;
  for (int i = 0; i < kRounds; ++i) {
    double slowest = 0;
    for (int host = 0; host < std::min(hosts, kMaxDrawnHosts); ++host)
      slowest = std::max(slowest, every == 1 ? steps[pick(random)] : draw_mean(random));
    sum += slowest;
  }
  return sum / kRounds;
}

}  // namespace

Prediction predict_step(const HostProfile& profile, const HostCosts& costs, const Cluster& cluster, Method method,
                        int every) {
  Prediction prediction;
  const int interval = exchanges_each_step(method) ? 1 : every;
  if (cluster.hosts > 1) {
    if (exchanges_each_step(method)) {
      for (const HostProfile::Model& model : profile.models) {
        const Exchange exchange = replay(profile, model, costs, cluster, method);
        prediction.exposed_s += exchange.exposed_s * model.passes_per_step;
        prediction.bytes += exchange.bytes * model.passes_per_step;
      }
    } else {
      const Exchange exchange = round(profile, costs, cluster, method);
      prediction.exposed_s = exchange.exposed_s / interval;
      prediction.bytes = exchange.bytes / interval;
    }
  }
  std::mt19937 random(1);  // the same steps give the same prediction
  std::vector<double> means;
  for (int i = 0; i < kResamples; ++i) {
    std::vector<double> sample(profile.steps_s.size());
    std::uniform_int_distribution<std::size_t> pick(0, sample.size() - 1);
    for (double& step : sample) step = profile.steps_s[pick(random)];
    means.push_back(slowest_of(sample, cluster.hosts, interval, random));
  }
  prediction.step_s = average_of(means) + prediction.exposed_s;
  std::sort(means.begin(), means.end());
  const double doublings = std::max(0.0, std::log2(static_cast<double>(cluster.hosts) / kComparedHosts));
  const double error = cluster.hosts > 1 ? (kModelError + kErrorPerDoubling * doublings) * prediction.step_s : 0;
  prediction.low_s = means[kResamples / 20] + prediction.exposed_s - error;
  prediction.high_s = means[kResamples - 1 - kResamples / 20] + prediction.exposed_s + error;
  return prediction;
}

}  // namespace lockstep::launcher::predict
