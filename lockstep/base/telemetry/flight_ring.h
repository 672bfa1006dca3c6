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
struct OperationStart {
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
  std::int64_t started;             ///< ticks
  std::atomic<std::int64_t> ended;  ///< 0: not yet; kAbandoned
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
  static constexpr std::int64_t kAbandoned = -1;

  std::atomic<std::uint64_t> started;  ///< entries
  std::atomic<std::uint32_t> num_channels;
  std::uint32_t unused;
  char channels[kChannels][kChannelBytes];  ///< names
  FlightEntry entries[kEntries];

  /// A place for the name. When there is none left, the last one is for all that come.
  std::uint16_t add_channel(std::string_view name) noexcept;

  /// The entry's number, for end().
  std::uint64_t begin(const OperationStart& note) noexcept {
    const std::uint64_t number = started.fetch_add(1, std::memory_order_relaxed) + 1;
    FlightEntry& entry = entries[number % kEntries];
    entry.number.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    entry.seq = note.seq;
    entry.bytes = note.bytes;
    entry.step = note.step;
    entry.started = ticks();
    entry.ended.store(0, std::memory_order_relaxed);
    entry.channel.store(note.channel, std::memory_order_relaxed);
    copy_text(entry.kind, note.kind);
    copy_text(entry.dtype, note.dtype);
    copy_text(entry.name, note.name);
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
  void abandon(std::uint16_t channel) noexcept;

 private:
  template <std::size_t n>
  static void copy_text(char (&slot)[n], std::string_view text) noexcept {
    const std::size_t size = std::min(n, text.size());
    if (size > 0) std::memcpy(slot, text.data(), size);
    if (size < n) slot[size] = 0;
  }
};

/// A copy of an entry, checked: it may come from a stranger, and is printable.
struct OperationRecord {
  std::uint64_t number = 0;
  std::uint64_t seq = 0;
  std::uint64_t bytes = 0;
  std::int64_t step = 0;
  std::int64_t
      started = 0,
      ended = 0;  ///< ticks, or what a reader has made of them; `ended` is 0 while it goes on, and may be kAbandoned
  std::string channel, kind, dtype, name;

  bool is_running() const { return ended == 0; }
  bool is_abandoned() const { return ended == FlightRing::kAbandoned; }
  bool is_finished() const { return !is_running() && !is_abandoned(); }
};

/// The entries of a copy of a ring, in the order in which they began.
std::vector<OperationRecord> read_flight_ring(const FlightRing& ring);

/// Without what a terminal would obey.
std::string printable(std::string_view text);

}  // namespace lockstep::base
