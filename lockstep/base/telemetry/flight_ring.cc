#include "lockstep/base/telemetry/flight_ring.h"

#include <cctype>

namespace lockstep::base::telemetry {

std::string printable(std::string_view text) {
  std::string result(text);
  std::replace_if(
      result.begin(), result.end(), [](char c) { return std::isprint(static_cast<unsigned char>(c)) == 0; }, '?');
  return result;
}

std::uint16_t FlightRing::add_channel(std::string_view name) noexcept {
  const std::uint32_t slot =
      std::min<std::uint32_t>(num_channels.fetch_add(1, std::memory_order_relaxed), kChannels - 1);
  copy_text(channels[slot], slot + 1 < kChannels ? name : "(one of many)");
  return static_cast<std::uint16_t>(slot);
}

void FlightRing::abandon(std::uint16_t channel) noexcept {
  for (FlightEntry& entry : entries) {
    std::int64_t running = 0;
    if (entry.number.load(std::memory_order_acquire) != 0 && entry.channel == channel)
      entry.ended.compare_exchange_strong(running, kAbandoned);
  }
}

std::vector<OperationRecord> read_flight_ring(const FlightRing& ring) {
  std::vector<OperationRecord> records;
  for (std::size_t i = 0; i < FlightRing::kEntries; ++i) {
    const FlightEntry& entry = ring.entries[i];
    const std::uint64_t number = entry.number;
    if (number == 0 || number % FlightRing::kEntries != i) continue;
    records.push_back(
        {.number = number,
         .seq = entry.seq,
         .bytes = entry.bytes,
         .step = entry.step,
         .started = entry.started,
         .ended = entry.ended,
         .channel = text_of(ring.channels[std::min<std::size_t>(entry.channel.load(), FlightRing::kChannels - 1)]),
         .kind = text_of(entry.kind),
         .dtype = text_of(entry.dtype),
         .name = text_of(entry.name)});
  }
  std::sort(records.begin(), records.end(),
            [](const OperationRecord& a, const OperationRecord& b) { return a.number < b.number; });
  return records;
}

}  // namespace lockstep::base::telemetry
