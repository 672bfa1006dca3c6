#include "lockstep/base/telemetry/flight_ring.h"

#include <cctype>

namespace lockstep::base {
namespace {

template <std::size_t n>
std::string text_of(const char (&text)[n]) {
  return printable(std::string_view(text, ::strnlen(text, n)));
}

}  // namespace

std::string printable(std::string_view text) {
  std::string result(text);
  std::replace_if(
      result.begin(), result.end(), [](char c) { return std::isprint(static_cast<unsigned char>(c)) == 0; }, '?');
  return result;
}

std::uint16_t FlightRing::add_channel(std::string_view name) noexcept {
  const std::uint32_t place =
      std::min<std::uint32_t>(num_channels.fetch_add(1, std::memory_order_relaxed), kChannels - 1);
  put(channels[place], place + 1 < kChannels ? name : "(one of many)");
  return static_cast<std::uint16_t>(place);
}

void FlightRing::give_up(std::uint16_t channel) noexcept {
  for (FlightEntry& entry : entries) {
    std::int64_t not_yet = 0;
    if (entry.number.load(std::memory_order_acquire) != 0 && entry.channel == channel)
      entry.ended.compare_exchange_strong(not_yet, kGivenUp);
  }
}

std::vector<FlightSeen> read_flight(const FlightRing& ring) {
  std::vector<FlightSeen> all;
  for (std::size_t i = 0; i < FlightRing::kEntries; ++i) {
    const FlightEntry& entry = ring.entries[i];
    const std::uint64_t number = entry.number;
    if (number == 0 || number % FlightRing::kEntries != i) continue;
    all.push_back(
        {.number = number,
         .seq = entry.seq,
         .bytes = entry.bytes,
         .step = entry.step,
         .begun = entry.begun,
         .ended = entry.ended,
         .channel = text_of(ring.channels[std::min<std::size_t>(entry.channel.load(), FlightRing::kChannels - 1)]),
         .kind = text_of(entry.kind),
         .dtype = text_of(entry.dtype),
         .name = text_of(entry.name)});
  }
  std::sort(all.begin(), all.end(), [](const FlightSeen& a, const FlightSeen& b) { return a.number < b.number; });
  return all;
}

}  // namespace lockstep::base
