#include "lockstep/data/loader_core.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/base/process_owned.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/group_access.h"

namespace lockstep::data {
namespace {

/// Throws UsageError unless `device` is cpu or an accelerator that libtorch can use in this process.
void check_device(at::Device device) {
  if (device.is_cpu()) return;
  const std::string start = "LoaderOptions.device is " + device.str();
  if (!at::accelerator::isAccelerator(device.type()))
    throw base::UsageError(start + ", which is not an accelerator; expected cpu or Group::device()");
  if (!c10::impl::hasDeviceGuardImpl(device.type()))
    throw base::UsageError(start +
                           ", which libtorch cannot use in this process; expected cpu, or Group::device() after "
                           "lockstep::init() found a GPU");
  const int count = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
  if (device.index() >= count || count == 0)
    throw base::UsageError(start + ", but this process has " + std::to_string(count) +
                           " devices of this type; expected " +
                           (count > 0 ? "an index below " + std::to_string(count) + ", or " : "") + "cpu");
}

void require(std::string_view option, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value < low || value > high)
    throw base::UsageError("LoaderOptions." + std::string(option) + " is " + std::to_string(value) + "; expected " +
                           std::to_string(low) + " to " + std::to_string(high));
}

LoaderOptions validated(const LoaderOptions& options) {
  require("batch_size", options.batch_size, 1, std::int64_t{1} << 31);
  require("num_workers", options.num_workers, 0, 256);
  require("prefetch", options.prefetch, 1, 1024);
  require("timeout", options.timeout.count(), 1, INT64_MAX);
  if (options.drop_last && options.mode == ShardMode::kExact)
    throw base::UsageError(
        "LoaderOptions.drop_last is true with mode kExact, which draws every sample; expected drop_last = false, or "
        "mode kPad or kDrop");
  check_device(options.device);
  return options;
}

std::string first_line(const char* text) {
  const std::string_view all(text);
  return std::string(all.substr(0, all.find('\n')));
}

/// `saved`: what differs and its saved value; `mine`: the value of this loader.
[[noreturn]] void throw_other_order(const LoaderPosition& position, const std::string& saved, const std::string& mine) {
  const bool is_beginning = position.samples_drawn == 0, is_end = position.samples_drawn == position.num_samples;
  const std::uint64_t next = position.epoch + (is_beginning ? 0 : 1);
  throw base::UsageError(
      std::string("Loader::load_state_dict: the saved position is ") +
          (is_beginning ? "at the beginning of"
           : is_end     ? "at the end of"
                        : "inside") +
          " epoch " + std::to_string(position.epoch) + " with " + saved + ", and this loader has " + mine +
          "; expected the same",
      "restore the position with the same dataset, seed and shuffle, or do not restore it and begin with epoch(" +
          std::to_string(next) + ")" + (is_beginning || is_end ? "" : ", without the samples that remain"));
}

/// Moves the batch's host tensors into pinned memory, from which copies to `device` run asynchronously. The memory
/// comes from libtorch, which reuses it after the copies from it are complete. Thread-safe for different batches.
void pin_memory(void* batch, const BatchVisitor& visitor, at::Device device) {
  const at::NoGradGuard no_grad;
  // Without the guard, a new thread's current device would be another one, and pinning would allocate memory there.
  const c10::DeviceGuard guard(device);
  visitor(batch, [](at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided) tensor = tensor.pin_memory();
  });
}

at::Stream copy_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl gpus(device.type());
  return gpus.getStreamFromGlobalPool(device.has_index() ? device : gpus.getDevice());
}

}  // namespace

/// Copies batches to a device ahead of their use, on a separate stream. Not thread-safe.
class DevicePrefetcher {
 public:
  /// "cuda" without an index selects the calling thread's current GPU. `device` must have passed check_device() and
  /// must not be cpu.
  DevicePrefetcher(at::Device device, BatchVisitor visitor)
      : visitor_(std::move(visitor)),
        stream_(copy_stream(device)),
        copy_done_(device.type()),
        consumed_{c10::Event(device.type()), c10::Event(device.type())} {}

  /// The device, including its index.
  at::Device device() const { return stream_.device(); }

  /// Let k be the batch that was delivered last. Blocks until the device has executed the work that was on the
  /// consumer's stream when batch k - 1 was delivered. This bounds how far a program that never synchronizes runs ahead
  /// of the device, and therefore the memory of its batches. Returns false if the work is not complete by `deadline`.
  bool wait_for_consumer(base::Deadline deadline) const {
    const c10::Event& previous = consumed_[num_delivered_ % 2];
    return base::poll_until(deadline, std::chrono::microseconds(500), [&] { return previous.query(); });
  }

  /// Replaces the batch's host tensors by device tensors whose contents are copied asynchronously. Does not block if
  /// the host tensors are pinned.
  void start_copy(void* batch) {
    const at::NoGradGuard no_grad;
    const c10::StreamGuard guard(stream_);
    visitor_(batch, [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_cpu())
        tensor = tensor.to(at::TensorOptions(stream_.device()), /*non_blocking=*/true);
    });
    copy_done_.record(stream_);
  }

  /// Makes the calling thread's current stream wait for the copy that was started last. Work that this thread then
  /// enqueues on that stream reads the copied contents. libtorch does not reuse the tensors' memory until all work that
  /// was enqueued on that stream before their destruction has completed. Does not block the host.
  void wait_on_current_stream(void* batch) {
    const at::Stream current = c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
    consumed_[num_delivered_++ % 2].record(current);
    copy_done_.block(current);
    visitor_(batch, [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.device() == stream_.device()) tensor.record_stream(current);
    });
  }

 private:
  const BatchVisitor visitor_;
  const at::Stream stream_;
  c10::Event copy_done_;
  std::array<c10::Event, 2> consumed_;  // recorded on the consumer's stream when a batch is delivered
  std::size_t num_delivered_ = 0;
};

/// Makes item number `number`. Checks `stop` between its steps and returns null if a stop is requested.
using ItemMaker = std::function<std::shared_ptr<void>(std::uint64_t number, const std::stop_token& stop)>;

/// Makes items 0 .. num_items-1 with one thread per element of `makers`, at most `window` items ahead of the next item
/// to be taken. Which thread makes which item depends on timing; the order in which next() returns the items does not.
class OrderedWorkers {
 public:
  /// Starts the threads. Throws SystemError if a thread cannot be started, after stopping those that were.
  /// `stop_timeout` bounds the destructor.
  OrderedWorkers(std::uint64_t num_items, std::vector<ItemMaker> makers, std::uint64_t window,
                 std::chrono::milliseconds stop_timeout)
      : state_(std::make_shared<State>(num_items, window)), stop_timeout_(stop_timeout) {
    const std::size_t num_threads = makers.size();
    threads_.reserve(num_threads);
    try {
      for (auto& make : makers) {
        {
          const std::lock_guard lock(state_->mutex);
          ++state_->num_running;
        }
        threads_.push_back(base::start_thread([state = state_, make = std::move(make)]() mutable {
          state->work(make);
          make = nullptr;  // destroy the dataset's copy before the thread counts as ended
          const std::lock_guard lock(state->mutex);
          --state->num_running;
          state->slot_filled.notify_all();
        }));
      }
    } catch (const base::Error& error) {
      {
        const std::lock_guard lock(state_->mutex);
        --state_->num_running;
      }
      const std::string which = std::to_string(threads_.size() + 1) + " of " + std::to_string(num_threads);
      stop(base::Deadline::in(stop_timeout_));
      throw base::Error(error.cause(), "loader thread " + which + ": " + error.what(), error.hint());
    }
  }

  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  /// Requests a stop and blocks until every thread has finished its current step and ended, at most `stop_timeout`. A
  /// thread that is then still inside its maker is detached, with a warning; it owns everything that it uses.
  ~OrderedWorkers() { stop(base::Deadline::in(stop_timeout_)); }

  /// Blocks until the next item is ready and returns it; null at `deadline` and after the last item. Rethrows the
  /// maker's exception when the failed item is next; every later call returns null. Must be called by one thread only.
  std::shared_ptr<void> next(base::Deadline deadline) {
    State::Slot taken;
    {
      std::unique_lock lock(state_->mutex);
      if (state_->next_taken >= state_->num_items) return nullptr;
      State::Slot& slot = state_->slot_of(state_->next_taken);
      if (!base::wait_until(state_->slot_filled, lock, deadline, [&] { return slot.is_ready; })) return nullptr;
      taken = std::exchange(slot, {});
      // No item follows an error: the threads finish their current items and stop.
      state_->next_taken = taken.error ? state_->num_items : state_->next_taken + 1;
      if (taken.error) state_->stop.request_stop();
    }
    state_->slot_freed.notify_all();
    if (taken.error) std::rethrow_exception(taken.error);
    return std::move(taken.item);
  }

 private:
  // Shared with every thread, so that it outlives a detached thread.
  struct State {
    struct Slot {
      bool is_ready = false;
      std::shared_ptr<void> item;
      std::exception_ptr error;
    };

    State(std::uint64_t items, std::uint64_t window) : num_items(items), slots(window) {}

    void work(const ItemMaker& make) {
      const auto token = stop.get_token();
      std::unique_lock lock(mutex);
      for (;;) {
        base::wait_until(slot_freed, lock, base::Deadline::never(),  // bounded: the owner's destructor requests a stop
                         [&] { return token.stop_requested() || next_started >= num_items || has_free_slot(); });
        if (token.stop_requested() || next_started >= num_items) break;
        const std::uint64_t number = next_started++;
        lock.unlock();
        Slot result{.is_ready = true, .item = nullptr, .error = nullptr};
        try {
          result.item = make(number, token);
        } catch (...) {
          result.error = std::current_exception();
        }
        lock.lock();
        slot_of(number) = std::move(result);
        slot_filled.notify_all();
      }
      slot_freed.notify_all();
    }

    Slot& slot_of(std::uint64_t number) { return slots[number % slots.size()]; }
    // Requires the mutex. Returns whether a thread may start the next item.
    bool has_free_slot() const { return next_started < next_taken + slots.size(); }

    const std::uint64_t num_items;
    std::stop_source stop;

    std::mutex mutex;                     // guards all below
    std::condition_variable slot_freed;   // a slot was freed, or a stop was requested
    std::condition_variable slot_filled;  // a slot was filled, or a thread has ended
    std::vector<Slot> slots;
    std::uint64_t next_started = 0;
    std::uint64_t next_taken = 0;
    std::size_t num_running = 0;
  };

  void stop(base::Deadline deadline) {
    bool ended = false;
    {
      std::unique_lock lock(state_->mutex);
      state_->stop.request_stop();
      state_->slot_freed.notify_all();
      ended = base::wait_until(state_->slot_filled, lock, deadline, [&] { return state_->num_running == 0; });
    }
    if (!ended)
      base::log_warning("a loader thread is still inside the dataset " + std::to_string(stop_timeout_.count()) +
                        " ms after a stop was requested; it is detached");
    for (auto& thread : threads_) {
      if (ended)
        thread.join();  // bounded: the thread has ended its work
      else
        thread.detach();
    }
  }

  std::shared_ptr<State> state_;
  std::vector<std::thread> threads_;
  std::chrono::milliseconds stop_timeout_;
};

bool has_equal_batch_counts(DataShard shard, const LoaderOptions& options) {
  return shard.size > 1 && options.mode != ShardMode::kExact;
}

std::function<void(const LoaderPosition&)> detail::make_batch_counter(const comm::Group& world,
                                                                      const LoaderOptions& options) {
  if (!has_equal_batch_counts({world.rank(), world.size()}, options)) return nullptr;
  return [group = world, size = options.batch_size, mode = options.mode](const LoaderPosition& position) {
    const OrderFingerprint order = order_fingerprint(position, size, mode);
    comm::GroupAccess::count_batch(group, order.hash, order.parts);
  };
}

void throw_sample_error(std::uint64_t index, std::size_t num_samples) {
  const std::string where = num_samples == 1 ? "sample " + std::to_string(index) + ": "
                                             : "one of " + std::to_string(num_samples) +
                                                   " samples that begin with sample " + std::to_string(index) + ": ";
  try {
    throw;
  } catch (const base::Error& error) {
    std::throw_with_nested(SampleError(index, error.cause(), where + error.what()));
  } catch (const c10::Error& error) {
    std::throw_with_nested(
        SampleError(index, base::Cause::kBadFile, where + first_line(error.what_without_backtrace())));
  } catch (const std::exception& error) {
    std::throw_with_nested(SampleError(index, base::Cause::kBadFile, where + first_line(error.what())));
  } catch (...) {
    std::throw_with_nested(
        SampleError(index, base::Cause::kBadFile, where + "an exception that is not a std::exception"));
  }
}

LoaderCore::LoaderCore(std::uint64_t num_samples, DataShard shard, const LoaderOptions& options,
                       std::function<BatchMaker(std::uint64_t epoch)> make_batch_maker, BatchVisitor visitor,
                       std::function<void(const LoaderPosition&)> on_batch)
    : options_(validated(options)),
      sampler_(num_samples, shard, {.seed = options.seed, .shuffle = options.shuffle, .mode = options.mode}),
      make_batch_maker_(std::move(make_batch_maker)),
      on_batch_(std::move(on_batch)),
      position_{.seed = options.seed, .num_samples = num_samples, .shuffle = options.shuffle} {
  if (options.device.is_cpu()) return;
  prefetcher_ = std::make_unique<DevicePrefetcher>(options.device, visitor);
  make_batch_maker_ = [make_on_host = std::move(make_batch_maker_), visitor = std::move(visitor),
                       device = prefetcher_->device()](std::uint64_t epoch) -> BatchMaker {
    return [make = make_on_host(epoch), visitor, device](const std::vector<std::size_t>& indices,
                                                         const std::stop_token& stop) {
      auto batch = make(indices, stop);
      if (batch) pin_memory(batch.get(), visitor, device);
      return batch;
    };
  };
}

LoaderCore::~LoaderCore() = default;

BatchPlan LoaderCore::plan(std::uint64_t epoch, std::uint64_t position) const {
  return BatchPlan(sampler_.epoch(epoch, position), static_cast<std::uint64_t>(options_.batch_size),
                   options_.drop_last);
}

void LoaderCore::restore(const LoaderPosition& position) {
  if (position.samples_drawn > position.num_samples)
    throw base::UsageError("Loader::load_state_dict: the position \"" + to_text(position) +
                           "\" is beyond the end of its dataset; expected at most " +
                           std::to_string(position.num_samples) + " samples");
  const auto require = [&](const std::string& what, std::uint64_t saved, std::uint64_t mine) {
    if (saved != mine) throw_other_order(position, what + " " + std::to_string(saved), std::to_string(mine));
  };
  require("seed", position.seed, options_.seed);
  require("num_samples", position.num_samples, sampler_.num_samples());
  require("shuffle", position.shuffle ? 1 : 0, options_.shuffle ? 1 : 0);
  position_ = position;
  restored_ = position;
}

std::shared_ptr<BatchIterator> LoaderCore::start(std::uint64_t epoch) {
  const bool is_resumed = restored_ && restored_->epoch == epoch;
  position_.epoch = epoch;
  position_.samples_drawn = is_resumed ? restored_->samples_drawn : 0;
  restored_.reset();
  return base::make_process_owned<BatchIterator>(shared_from_this(), plan(epoch, position_.samples_drawn), position_);
}

std::uint64_t LoaderCore::next_epoch() const {
  // With kExact, this rank may have no batch left while another has one, and all ranks must choose the same epoch.
  const bool is_complete = options_.mode == ShardMode::kExact
                               ? position_.samples_drawn == position_.num_samples
                               : plan(position_.epoch, position_.samples_drawn).num_batches() == 0;
  return position_.epoch + (is_complete ? 1 : 0);
}

std::shared_ptr<BatchIterator> LoaderCore::resume() {
  const std::uint64_t epoch = next_epoch();
  if (epoch == position_.epoch) restored_ = position_;
  return start(epoch);
}

BatchIterator::BatchIterator(std::shared_ptr<LoaderCore> loader, BatchPlan plan, const LoaderPosition& start)
    : loader_(std::move(loader)), plan_(std::move(plan)), start_(start) {}

BatchIterator::~BatchIterator() = default;

void BatchIterator::start_workers() {
  const LoaderOptions& options = loader_->options_;
  const auto num_threads = std::min(static_cast<std::uint64_t>(options.num_workers), size());
  std::vector<ItemMaker> makers;
  // A detached thread must own everything that it uses, so the makers do not refer to this iterator or the loader.
  for (std::uint64_t i = 0; i < num_threads; ++i)
    makers.emplace_back(
        [plan = plan_, make = loader_->make_batch_maker_(start_.epoch)](
            std::uint64_t batch, const std::stop_token& stop) { return make(plan.indices(batch), stop); });
  workers_ = std::make_unique<OrderedWorkers>(
      size(), std::move(makers), num_threads * static_cast<std::uint64_t>(options.prefetch), options.timeout);
}

/// Returns null if a worker has not finished the batch by `deadline`.
std::shared_ptr<void> BatchIterator::make(std::uint64_t number, base::Deadline deadline) {
  if (loader_->options_.num_workers == 0) {
    if (!inline_maker_) inline_maker_ = loader_->make_batch_maker_(start_.epoch);
    return inline_maker_(plan_.indices(number), std::stop_token());
  }
  if (!workers_) start_workers();
  return workers_->next(deadline);
}

std::shared_ptr<void> BatchIterator::wait_for_batch() {
  const LoaderOptions& options = loader_->options_;
  auto batch = make(num_taken_, base::Deadline::in(options.timeout));
  if (!batch)
    throw base::TimeoutError(base::Cause::kRankStuck, "loader", loader_->sampler_.shard().rank, -1,
                             "batch " + std::to_string(num_taken_) + " of " + std::to_string(size()) + " of epoch " +
                                 std::to_string(start_.epoch) + " was not ready after " +
                                 std::to_string(options.timeout.count()) + " ms; its first sample is " +
                                 std::to_string(plan_.indices(num_taken_).front()),
                             "find out why the dataset is slow or blocked, or raise LoaderOptions.timeout");
  return batch;
}

/// Starts the copy of the next batch before the current one is returned, unless a worker is still loading it, so that
/// the copy overlaps with the computation on the current batch.
std::shared_ptr<void> BatchIterator::next_on_device() {
  DevicePrefetcher& prefetcher = *loader_->prefetcher_;
  if (!prefetched_) {
    prefetched_ = PrefetchedBatch{wait_for_batch(), nullptr};
    prefetcher.start_copy(prefetched_->batch.get());
  }
  const PrefetchedBatch current = *std::exchange(prefetched_, std::nullopt);
  if (current.error) std::rethrow_exception(current.error);
  prefetcher.wait_on_current_stream(current.batch.get());
  if (num_taken_ + 1 < size()) prefetch_to_device();
  return current.batch;
}

void BatchIterator::prefetch_to_device() {
  try {
    auto batch = make(num_taken_ + 1, base::Deadline::in(std::chrono::milliseconds(0)));
    if (!batch) return;
    const LoaderOptions& options = loader_->options_;
    if (!loader_->prefetcher_->wait_for_consumer(base::Deadline::in(options.timeout)))
      throw base::TimeoutError(base::Cause::kRankStuck, "loader", loader_->sampler_.shard().rank, -1,
                               "batch " + std::to_string(num_taken_ + 1) + " of epoch " + std::to_string(start_.epoch) +
                                   " was not copied to " + loader_->prefetcher_->device().str() +
                                   ": the device had not finished the batch before the previous one after " +
                                   std::to_string(options.timeout.count()) + " ms",
                               "find out which work on the device is slow or blocked, or raise LoaderOptions.timeout");
    loader_->prefetcher_->start_copy(batch.get());
    prefetched_ = PrefetchedBatch{std::move(batch), nullptr};
  } catch (...) {
    prefetched_ = PrefetchedBatch{nullptr, std::current_exception()};  // rethrown when this batch is requested
  }
}

std::shared_ptr<void> BatchIterator::next() {
  if (failed_) return nullptr;
  LoaderPosition& position = loader_->position_;
  position.epoch = start_.epoch;
  if (num_taken_ == size()) {
    position.samples_drawn = start_.num_samples;
    workers_.reset();
    return nullptr;
  }
  failed_ = true;
  auto batch = loader_->prefetcher_ ? next_on_device() : wait_for_batch();
  failed_ = false;
  ++num_taken_;
  const std::uint64_t samples_per_step = static_cast<std::uint64_t>(loader_->options_.batch_size) *
                                         static_cast<std::uint64_t>(loader_->sampler_.shard().size);
  position.samples_drawn = std::min(start_.num_samples, start_.samples_drawn + num_taken_ * samples_per_step);
  base::telemetry::RankPage::this_process().alive_count.fetch_add(1, std::memory_order_relaxed);
  if (loader_->on_batch_) loader_->on_batch_(position);
  return batch;
}

}  // namespace lockstep::data
