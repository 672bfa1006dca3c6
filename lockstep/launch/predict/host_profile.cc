#include "lockstep/launch/predict/host_profile.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "lockstep/base/error.h"
#include "lockstep/base/net/socket.h"

namespace lockstep::launcher::predict {
namespace {

using base::Deadline;
using Json = nlohmann::json;
using namespace std::chrono_literals;

constexpr std::size_t kBytes = std::size_t{64} << 20, kPiece = std::size_t{64} << 10;
constexpr double kNever = 1e9;  // seconds before the end of backward(): this rank did not have it, others may

double positive(const Json& value) {
  const double number = value.get<double>();
  if (!(number >= 0 && number < 1e18)) throw base::FormatError("a rank's profile has the number " + value.dump());
  return number;
}

HostProfile parse_profile(const Json& file) {
  HostProfile profile;
  profile.ranks = file.at("world_size").get<int>();
  for (const Json& step : file.at("steps_s")) profile.steps_s.push_back(positive(step));
  for (const Json& model : file.at("models")) {
    HostProfile::Model& one = profile.models.emplace_back();
    one.passes_per_step = positive(model.at("passes_per_step"));
    for (const Json& gradient : model.at("gradients")) {
      one.gradients.push_back(
          {.bytes = positive(gradient.at("bytes")),
           .rows = positive(gradient.at("rows")),
           .columns = positive(gradient.at("columns")),
           .is_float32 = gradient.at("is_float32").get<bool>(),
           .lead_s = gradient.at("count").get<int>() > 0 ? positive(gradient.at("lead_s")) : kNever});
    }
  }
  return profile;
}

double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

double copy_s_per_byte() {
  const std::vector<char> from(kBytes, 1);
  std::vector<char> to(kBytes);
  double best = 1;
  for (int run = 0; run < 3; ++run) {
    const auto begun = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), kBytes);
    best = std::min(best, seconds_since(begun) / kBytes);
  }
  return best;
}

double wire_s_per_byte() {
  const base::Fd listener = base::net::listen_on({"127.0.0.1", 0});
  const base::Fd sender = base::net::connect_to(base::net::local_address(listener.get()), Deadline::in(10s));
  if (!base::net::wait_readable(listener.get(), Deadline::in(10s)))
    throw base::SystemError("a connection on loopback", ETIMEDOUT);
  const base::Fd receiver = base::net::try_accept(listener.get());
  if (receiver.get() < 0) throw base::SystemError("a connection on loopback", errno);
  std::vector<char> piece(kPiece, 1);
  const auto begun = std::chrono::steady_clock::now();
  for (std::size_t sent = 0; sent < kBytes; sent += kPiece) {
    base::net::send_all(sender.get(), {piece.data(), piece.size()}, Deadline::in(10s));
    if (!base::net::recv_all(receiver.get(), piece.data(), piece.size(), Deadline::in(10s)))
      throw base::SystemError("a connection on loopback", ECONNRESET);
  }
  return seconds_since(begun) / kBytes;
}

}  // namespace

HostProfile parse_profiles(const std::vector<std::string>& files) {
  HostProfile all;
  try {
    for (const std::string& file : files) {
      HostProfile one = parse_profile(Json::parse(file));
      if (all.steps_s.empty()) {
        all = std::move(one);
        continue;
      }
      const std::size_t steps = std::min(all.steps_s.size(), one.steps_s.size());
      all.steps_s.resize(steps);
      for (std::size_t i = 0; i < steps; ++i) all.steps_s[i] = std::max(all.steps_s[i], one.steps_s[i]);
      for (std::size_t m = 0; m < std::min(all.models.size(), one.models.size()); ++m) {
        auto& mine = all.models[m].gradients;
        const auto& theirs = one.models[m].gradients;
        for (std::size_t i = 0; i < std::min(mine.size(), theirs.size()); ++i)
          mine[i].lead_s = std::min(mine[i].lead_s, theirs[i].lead_s);
      }
    }
  } catch (const Json::exception& error) {
    throw base::FormatError(std::string("a rank's profile cannot be read: ") + error.what());
  }
  for (HostProfile::Model& model : all.models) {
    std::erase_if(model.gradients, [](const Gradient& gradient) { return gradient.lead_s == kNever; });
    std::stable_sort(model.gradients.begin(), model.gradients.end(),
                     [](const Gradient& a, const Gradient& b) { return a.lead_s > b.lead_s; });
  }
  return all;
}

double average_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) /
         static_cast<double>(std::max<std::size_t>(1, values.size()));
}

double gradient_bytes(const HostProfile& profile) {
  double bytes = 0;
  for (const HostProfile::Model& model : profile.models)
    for (const Gradient& gradient : model.gradients) bytes += gradient.bytes * model.passes_per_step;
  return bytes;
}

HostCosts measure_host_costs() {
  return {.wire_s_per_byte = wire_s_per_byte(), .memory_s_per_byte = copy_s_per_byte()};
}

}  // namespace lockstep::launcher::predict
