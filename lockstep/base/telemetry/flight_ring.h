// A lock-free ring of a rank's last operations in shared memory, which another process can read even after the rank has
// died.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "lockstep/base/atomic.h"
#include "lockstep/base/telemetry/shared_words.h"

namespace lockstep::base::telemetry {

/// Returns the processor's time stamp counter on x86-64, else the monotonic clock. Reading it takes a few nanoseconds.
/// All processes of a host read the same counter. Its rate is unknown; RankPage::published_ticks and published_ns
/// relate it to the monotonic clock.
inline std::int64_t ticks() noexcept {
#if defined(__x86_64__)
  return static_cast<std::int64_t>(__rdtsc());
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}

/// What FlightRing::begin() records about an operation. Texts longer than the fields of FlightEntry are truncated.
struct OperationStart {
  std::uint16_t channel = 0;  ///< returned by FlightRing::add_channel()
  std::uint64_t seq = 0;
  std::string_view kind;  ///< "all_reduce"
  std::string_view dtype;
  std::string_view name;
  std::uint64_t bytes = 0;
  std::int64_t step = 0;
};

/// The texts of an entry. A text that fills its field has no terminating zero.
struct FlightText {
  std::uint16_t channel;
  char kind[14];
  char dtype[8];
  char name[56];
};

/// One operation in the ring.
struct FlightEntry {
  Atomic<std::uint64_t> number;  ///< from 1; 0 if the entry is empty or being written
  Atomic<std::uint64_t> seq;
  Atomic<std::uint64_t> bytes;
  Atomic<std::int64_t> step;
  Atomic<std::int64_t> started;  ///< ticks
  Atomic<std::int64_t> ended;    ///< ticks; 0 while the operation runs; or kAbandoned
  SharedWords<FlightText> text;
};
static_assert(sizeof(FlightEntry) == 128);

/// A ring of the last kEntries operations. Any thread of one process may write; threads of any process may read at any
/// time. Zeroed memory is an empty ring. There are no locks and no system calls: an entry costs about 30 ns.
///
/// Memory ordering: an entry is a sequence lock (Boehm, "Can seqlocks get along with programming language memory
/// models?", 2012) without fences. begin() stores 0 to `number`, then each field with release, then `number` with
/// release. A reader loads `number`, then each field, with acquire, then `number` again. If it has read a field of a
/// later operation, that store happened after `number` was reset, so the second load returns another number and the
/// reader drops the entry. If both loads return the same number, the fields are those of that operation, except that
/// `ended` may have been set meanwhile. The name of a channel is written once, before the index of that channel is
/// used: whoever reads the index in an entry reads the name. Two writers meet in one entry only if 4096 operations
/// start while one thread is in begin(); the entry may then mix both. No tool here shows a missing order in this
/// protocol: ThreadSanitizer takes no atomic access for a race, and the scheduler of tests/schedules is sequentially
/// consistent. The ring may belong to an untrusted process: read_flight_ring() trusts no value.
struct FlightRing {
  static constexpr std::size_t kEntries = 4096;
  static constexpr std::size_t kChannels = 256;
  static constexpr std::size_t kChannelBytes = 64;
  static constexpr std::int64_t kAbandoned = -1;

  Atomic<std::uint64_t> started;  ///< number of operations that have started
  Atomic<std::uint32_t> num_channels;
  std::uint32_t unused;
  char channels[kChannels][kChannelBytes];  ///< names
  FlightEntry entries[kEntries];

  /// Registers a channel name and returns its index. Names beyond kChannels share the last index.
  std::uint16_t add_channel(std::string_view name) noexcept;

  /// Records the start of an operation and returns its number for end().
  std::uint64_t begin(const OperationStart& note) noexcept {
    const std::uint64_t number = started.fetch_add(1, std::memory_order_relaxed) + 1;
    FlightEntry& entry = entries[number % kEntries];
    entry.number.store(0, std::memory_order_relaxed);
    entry.seq.store(note.seq, std::memory_order_release);
    entry.bytes.store(note.bytes, std::memory_order_release);
    entry.step.store(note.step, std::memory_order_release);
    entry.started.store(ticks(), std::memory_order_release);
    entry.ended.store(0, std::memory_order_release);
    FlightText text{.channel = note.channel};
    copy_text(text.kind, note.kind);
    copy_text(text.dtype, note.dtype);
    copy_text(text.name, note.name);
    entry.text.store(text);
    entry.number.store(number, std::memory_order_release);
    // The ring has half a megabyte, so the next entry is not in the L1 cache. Prefetch it before the next operation
    // starts.
    const FlightEntry* next = &entries[(number + 1) % kEntries];
    __builtin_prefetch(next, 1);
    __builtin_prefetch(reinterpret_cast<const char*>(next) + 64, 1);
    return number;
  }

  /// Records that operation `number` has finished, and returns how many ticks it took. Has no effect and returns 0 if
  /// its entry has been overwritten.
  std::int64_t end(std::uint64_t number) noexcept {
    FlightEntry& entry = entries[number % kEntries];
    // The number differs if 4096 later operations have started.
    if (entry.number.load(std::memory_order_relaxed) != number) return 0;
    const std::int64_t now = ticks();
    entry.ended.store(now, std::memory_order_release);
    return now - entry.started.load(std::memory_order_relaxed);
  }

  /// Marks all running operations of `channel` as abandoned: they will never finish. Scans the whole ring.
  void abandon(std::uint16_t channel) noexcept;
};

/// A validated copy of an entry. The ring may belong to an untrusted process, so its texts are made printable.
struct OperationRecord {
  std::uint64_t number = 0;
  std::uint64_t seq = 0;
  std::uint64_t bytes = 0;
  std::int64_t step = 0;
  /// Ticks, or nanoseconds if the reader has converted them. `ended` is 0 while the operation runs, and may be
  /// kAbandoned.
  std::int64_t started = 0, ended = 0;
  std::string channel, kind, dtype, name;

  bool is_running() const { return ended == 0; }
  bool is_abandoned() const { return ended == FlightRing::kAbandoned; }
  bool is_finished() const { return !is_running() && !is_abandoned(); }
};

/// Returns the operation in entry `index`; nullopt if the entry is empty or changes meanwhile.
std::optional<OperationRecord> read_flight_entry(const FlightRing& ring, std::size_t index);
/// Returns the operations in a ring, in the order in which they started.
std::vector<OperationRecord> read_flight_ring(const FlightRing& ring);

}  // namespace lockstep::base::telemetry
