#include "lockstep/base/telemetry/flight_ring.h"

#include <algorithm>
#include <cctype>
#include <utility>

namespace lockstep::base::telemetry {

std::string printable(std::string_view text) {
  std::string result(text);
  std::replace_if(
      result.begin(), result.end(), [](char c) { return std::isprint(static_cast<unsigned char>(c)) == 0; }, '?');
  return result;
}

std::uint16_t FlightRing::add_channel(std::string_view name) noexcept {
  const std::uint32_t last = kChannels - 1;
  const std::uint32_t number = num_channels.fetch_add(1, std::memory_order_relaxed);
  if (number <= last) copy_text(channels[number], number < last ? name : "(one of many)");
  return static_cast<std::uint16_t>(std::min(number, last));
}

void FlightRing::abandon(std::uint16_t channel) noexcept {
  for (FlightEntry& entry : entries) {
    std::int64_t running = 0;
    if (entry.number.load(std::memory_order_acquire) != 0 && entry.text.load().channel == channel)
      entry.ended.compare_exchange_strong(running, kAbandoned);
  }
}

std::optional<OperationRecord> read_flight_entry(const FlightRing& ring, std::size_t index) {
  const FlightEntry& entry = ring.entries[index];
  const std::uint64_t number = entry.number.load(std::memory_order_acquire);
  if (number == 0 || number % FlightRing::kEntries != index) return std::nullopt;
  OperationRecord record{.number = number,
                         .seq = entry.seq.load(std::memory_order_acquire),
                         .bytes = entry.bytes.load(std::memory_order_acquire),
                         .step = entry.step.load(std::memory_order_acquire),
                         .started = entry.started.load(std::memory_order_acquire),
                         .ended = entry.ended.load(std::memory_order_acquire)};
  const FlightText text = entry.text.load();
  if (entry.number.load(std::memory_order_relaxed) != number) return std::nullopt;
  record.channel = text_of(ring.channels[std::min<std::size_t>(text.channel, FlightRing::kChannels - 1)]);
  record.kind = text_of(text.kind);
  record.dtype = text_of(text.dtype);
  record.name = text_of(text.name);
  return record;
}

std::vector<OperationRecord> read_flight_ring(const FlightRing& ring) {
  std::vector<OperationRecord> records;
  for (std::size_t i = 0; i < FlightRing::kEntries; ++i)
    if (auto record = read_flight_entry(ring, i)) records.push_back(std::move(*record));
  std::sort(records.begin(), records.end(),
            [](const OperationRecord& a, const OperationRecord& b) { return a.number < b.number; });
  return records;
}

}  // namespace lockstep::base::telemetry
