#include "lockstep/launch/doctor/network_cost.h"

#include <cmath>
#include <cstdio>

namespace lockstep::launcher::doctor {
namespace {

constexpr double kGigabit = 1e9 / 8;  // bytes per second

/// A class of networks, with the upper bound of the speed that a connection reaches on it, in Gb/s.
struct SpeedClass {
  double most;
  const char* name;
};
constexpr SpeedClass kClasses[] = {{0.2, "a network slower than a gigabit"},
                                   {1.5, "a gigabit network"},
                                   {3.5, "a 2.5 Gb/s network"},
                                   {6.5, "a 5 Gb/s network"},
                                   {14, "a 10 Gb/s network"},
                                   {32, "a 25 Gb/s network"},
                                   {70, "a 50 Gb/s network"},
                                   {150, "a 100 Gb/s network"}};

std::string with_unit(const char* form, double value, const char* unit) {
  char text[64];
  std::snprintf(text, sizeof text, form, value, unit);
  return text;
}

}  // namespace

double ring_all_reduce_seconds(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s) {
  if (num_hosts < 2 || bytes_per_s <= 0) return 0;
  const auto n = static_cast<double>(num_hosts);
  return 2 * (n - 1) / n * static_cast<double>(model_bytes) / bytes_per_s;
}

std::string network_class(double bytes_per_s) {
  for (const SpeedClass& one : kClasses)
    if (bytes_per_s / kGigabit <= one.most) return one.name;
  return "a network faster than 100 Gb/s";
}

bool is_slow(double bytes_per_s) { return bytes_per_s <= 1.5 * kGigabit; }

std::string speed_text(double bytes_per_s) { return with_unit("%.3g %s", bytes_per_s / kGigabit, "Gb/s"); }

std::string time_text(double seconds) {
  const double value = seconds >= 0.995 ? seconds : seconds * 1e3;
  return with_unit(value >= 9.95 ? "%.0f %s" : "%.2g %s", value, seconds >= 0.995 ? "s" : "ms");
}

std::string cost_text(std::size_t num_hosts, std::uint64_t model_bytes, double bytes_per_s, double copy_bytes_per_s) {
  const double seconds = ring_all_reduce_seconds(num_hosts, model_bytes, bytes_per_s);
  const std::string on_one =
      copy_bytes_per_s > 0 ? ", " + time_text(static_cast<double>(model_bytes) / copy_bytes_per_s) + " on one host"
                           : "";
  return "this is " + network_class(bytes_per_s) + ": " + time_text(seconds) + " per step for " +
         with_unit("%.3g %s", static_cast<double>(model_bytes) / 1e6, "MB") + " of gradients; " +
         time_text(ring_all_reduce_seconds(num_hosts, model_bytes, 10 * kGigabit)) + " at 10 Gb/s" + on_one + ", " +
         time_text(seconds / 8) + " when hosts exchange every 8 steps";
}

}  // namespace lockstep::launcher::doctor
