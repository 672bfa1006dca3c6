// The last operations of a rank, in memory that another process can read when the rank cannot speak any more.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace lockstep::base {

/// A time that takes a few nanoseconds to read: of the processor's own counter, where it has one that counts evenly.
/// Processes of a host read the same.
inline std::int64_t ticks() noexcept {
#if defined(__x86_64__)
  return static_cast<std::int64_t>(__rdtsc());
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}

/// What is told of an operation that begins. Text is cut to what an entry holds.
struct FlightNote {
  std::uint16_t channel = 0;  ///< of FlightRing::add_channel()
  std::uint64_t seq = 0;
  std::string_view kind;  ///< "all_reduce"
  std::string_view dtype;
  std::string_view name;
  std::uint64_t bytes = 0;
  std::int64_t step = 0;
};

/// One of them, as it lies in the ring. Text that fills its place has no zero at the end.
struct FlightEntry {
  std::atomic<std::uint64_t> number;  ///< from 1; 0: nothing here, or it is being written
  std::uint64_t seq;
  std::uint64_t bytes;
  std::int64_t step;
  std::int64_t begun;               ///< ticks
  std::atomic<std::int64_t> ended;  ///< 0: not yet; kGivenUp
  std::atomic<std::uint16_t> channel;
  char kind[14];
  char dtype[8];
  char name[56];
};
static_assert(sizeof(FlightEntry) == 128);

/// One process writes, any of its threads; zeroed memory is an empty ring. No locks and no system calls: an entry costs
/// some 30 ns.
struct FlightRing {
  static constexpr std::size_t kEntries = 4096;
  static constexpr std::size_t kChannels = 256;
  static constexpr std::size_t kChannelBytes = 64;
  static constexpr std::int64_t kGivenUp = -1;

  std::atomic<std::uint64_t> begun;  ///< entries
  std::atomic<std::uint32_t> num_channels;
  std::uint32_t unused;
  char channels[kChannels][kChannelBytes];  ///< names
  FlightEntry entries[kEntries];

  /// A place for the name. When there is none left, the last one is for all that come.
  std::uint16_t add_channel(std::string_view name) noexcept;

  /// The entry's number, for end().
  std::uint64_t begin(const FlightNote& note) noexcept {
    const std::uint64_t number = begun.fetch_add(1, std::memory_order_relaxed) + 1;
    FlightEntry& entry = entries[number % kEntries];
    entry.number.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    entry.seq = note.seq;
    entry.bytes = note.bytes;
    entry.step = note.step;
    entry.begun = ticks();
    entry.ended.store(0, std::memory_order_relaxed);
    entry.channel.store(note.channel, std::memory_order_relaxed);
    put(entry.kind, note.kind);
    put(entry.dtype, note.dtype);
    put(entry.name, note.name);
    entry.number.store(number, std::memory_order_release);
    // Half a megabyte goes round: what comes next is not in the nearest cache, and there is time until then.
    const FlightEntry* next = &entries[(number + 1) % kEntries];
    __builtin_prefetch(next, 1);
    __builtin_prefetch(reinterpret_cast<const char*>(next) + 64, 1);
    return number;
  }

  void end(std::uint64_t number) noexcept {
    FlightEntry& entry = entries[number % kEntries];
    // Not when 4096 others have begun since.
    if (entry.number.load(std::memory_order_relaxed) == number) entry.ended.store(ticks(), std::memory_order_release);
  }

  /// Nothing that goes on there will end. Looks at all entries.
  void give_up(std::uint16_t channel) noexcept;

 private:
  template <std::size_t n>
  static void put(char (&place)[n], std::string_view text) noexcept {
    const std::size_t size = std::min(n, text.size());
    if (size > 0) std::memcpy(place, text.data(), size);
    if (size < n) place[size] = 0;
  }
};

/// A copy of an entry, checked: it may come from a stranger, and is printable.
struct FlightSeen {
  std::uint64_t number = 0;
  std::uint64_t seq = 0;
  std::uint64_t bytes = 0;
  std::int64_t step = 0;
  std::int64_t begun = 0,
               ended =
                   0;  ///< ticks, or what a reader has made of them; `ended` is 0 while it goes on, and may be kGivenUp
  std::string channel, kind, dtype, name;

  bool goes_on() const { return ended == 0; }
  bool given_up() const { return ended == FlightRing::kGivenUp; }
  bool finished() const { return !goes_on() && !given_up(); }
};

/// The entries of a copy of a ring, in the order in which they began.
std::vector<FlightSeen> read_flight(const FlightRing& ring);

/// Without what a terminal would obey.
std::string printable(std::string_view text);

}  // namespace lockstep::base
