// The flight ring, which threads of a rank write while the agent reads it, in many schedules.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "lockstep/base/telemetry/flight_ring.h"
#include "tests/schedules/explore.h"

namespace lockstep::schedules {
namespace {

using base::telemetry::FlightRing;
using base::telemetry::OperationRecord;

/// Two threads write; with `reuse` one alone, always to the same entry. A reader finds only whole operations.
void explore_ring(bool reuse) {
  const auto memory = std::make_unique<std::uint64_t[]>(sizeof(FlightRing) / sizeof(std::uint64_t) + 1);
  auto& ring = *reinterpret_cast<FlightRing*>(memory.get());
  const auto write = [&](std::uint64_t thread) {
    for (std::uint64_t i = 1; i <= 3; ++i) {
      const std::uint64_t seq = i * 2 + thread;
      ring.end(ring.begin({.seq = seq, .name = std::string(40, static_cast<char>('a' + seq)), .bytes = seq * 3}));
      if (reuse) ring.started.store(i * FlightRing::kEntries);
    }
  };
  const auto read = [&](Fiber&) {
    for (int round = 0; round < 4; ++round)
      for (std::size_t i = 1; i <= (reuse ? 1 : 6); ++i)
        if (const auto seen = read_flight_entry(ring, i)) {
          Fiber::check(seen->bytes == seen->seq * 3, "an entry is mixed from two operations");
          Fiber::check(seen->name == std::string(40, static_cast<char>('a' + seen->seq)), "a name is mixed");
        }
  };
  std::vector<std::function<void(Fiber&)>> bodies{[&](Fiber&) { write(0); }, read};
  if (!reuse) bodies.emplace_back([&](Fiber&) { write(1); });
  explore_fibers({.num_ranks = 0}, bodies, [&] {
    std::memset(static_cast<void*>(&ring), 0, offsetof(FlightRing, entries) + 8 * sizeof(ring.entries[0]));
  });
}

TEST(Schedules, FlightRingWithTwoWriters) { explore_ring(false); }
TEST(Schedules, FlightRingEntryIsReused) { explore_ring(true); }

}  // namespace
}  // namespace lockstep::schedules
