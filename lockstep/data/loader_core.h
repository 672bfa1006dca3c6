// The loader without the types of its batches: which samples make a batch, who makes it, what was handed out.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/batch_plan.h"
#include "lockstep/data/device_prefetcher.h"
#include "lockstep/data/loader_position.h"
#include "lockstep/data/ordered_workers.h"
#include "lockstep/data/sampler.h"

namespace lockstep::data {

struct LoaderOptions {
  std::int64_t batch_size = 1;  ///< samples of this rank in a batch, 1 to 2^31
  std::uint64_t seed = 0;       ///< of the order; the same on all ranks
  bool shuffle = true;
  ShardMode mode = ShardMode::kPad;
  bool drop_last = false;  ///< leave out a last batch that is not full; not with kExact
  int num_workers = 0;  ///< threads that make batches, 0 to 256; 0: the calling thread makes each when it is asked for,
                        ///< with a device one earlier
  int prefetch = 2;     ///< batches that are ready or being made, for each worker, 1 to 1024
  std::chrono::milliseconds timeout =
      std::chrono::minutes(5);  ///< for a worker's batch, its end, and the device; more than 0
  /// Where batches are when they are handed out, Group::device() for one: their tensors on the host (visit_tensors.h)
  /// go through pinned memory, and are copied on a stream of the loader's own while the batch before is used. Three
  /// batches lie on the device then: in use, handed out, on its way; a program that never waits for the GPU waits here
  /// before there are more.
  at::Device device = at::kCPU;
};

/// Whether several ranks draw equally many batches, so that comparing their counts finds a rank that is out of step.
bool has_equal_batch_counts(DataShard shard, const LoaderOptions& options);
/// Of what must be the same on all ranks for each sample to be drawn once: seed, epoch, number of samples, shuffle,
/// mode. Pure.
std::uint32_t order_fingerprint(const LoaderPosition& position, ShardMode mode);

/// A sample could not be read. what() is "sample INDEX: " and the text of what the dataset threw, which is nested.
class SampleError : public base::Error {
 public:
  SampleError(std::uint64_t index, base::Cause cause, const std::string& message)
      : base::Error(cause, message), index_(index) {}
  std::uint64_t index() const { return index_; }

 private:
  std::uint64_t index_;
};

/// Inside a catch block: throws SampleError with the caught exception nested. `num_samples` > 1 when the dataset read
/// several at once, the first of which is `index`.
[[noreturn]] void throw_sample_error(std::uint64_t index, std::size_t num_samples = 1);

/// Makes a batch of the samples with these indices into the dataset; null when a stop is requested in between.
using BatchMaker =
    std::function<std::shared_ptr<void>(const std::vector<std::size_t>& indices, const std::stop_token& stop)>;

class BatchIterator;

/// What Loader<Batch> does that does not depend on Batch. Used by one thread.
class LoaderCore : public std::enable_shared_from_this<LoaderCore> {
 public:
  /// `make_batch_maker` is called once an epoch for each thread that makes batches. `on_batch` is called for each batch
  /// that is handed out. `tensors` are those of what a maker makes. Throws UsageError for an option out of its range.
  LoaderCore(std::uint64_t num_samples, DataShard shard, const LoaderOptions& options,
             std::function<BatchMaker(std::uint64_t epoch)> make_batch_maker, BatchVisitor visitor,
             std::function<void(const LoaderPosition&)> on_batch);

  /// Batches of this rank in a whole epoch.
  std::uint64_t batches_per_epoch() const { return plan(0, 0).num_batches(); }
  /// Begins `epoch`, at the restored position when that is of this epoch, otherwise at its beginning.
  std::unique_ptr<BatchIterator> start(std::uint64_t epoch);

  bool is_exact() const {
    return options_.mode != ShardMode::kPad ||
           position_.num_samples % static_cast<std::uint64_t>(sampler_.shard().size) == 0;
  }
  const LoaderPosition& position() const { return position_; }
  void restore(const LoaderPosition& position);

 private:
  friend class BatchIterator;

  BatchPlan plan(std::uint64_t epoch, std::uint64_t position) const;

  LoaderOptions options_;
  Sampler sampler_;
  std::function<BatchMaker(std::uint64_t epoch)> make_batch_maker_;
  std::function<void(const LoaderPosition&)> on_batch_;
  LoaderPosition position_;
  std::optional<LoaderPosition> restored_;
  std::unique_ptr<DevicePrefetcher> prefetcher_;  // null: batches stay on the host
};

/// One way through an epoch, or what remains of it. Destroyed early, it stops its threads.
class BatchIterator {
 public:
  BatchIterator(std::shared_ptr<LoaderCore> loader, BatchPlan plan, const LoaderPosition& start);

  /// The next batch; null after the last, and after an error. Waits at most LoaderOptions::timeout, then throws
  /// TimeoutError.
  std::shared_ptr<void> next();
  std::uint64_t size() const { return plan_.num_batches(); }
  /// Of the batch that was handed out last.
  std::vector<std::size_t> indices() const {
    return num_taken_ == 0 ? std::vector<std::size_t>() : plan_.indices(num_taken_ - 1);
  }

 private:
  struct PrefetchedBatch {
    std::shared_ptr<void> batch;
    std::exception_ptr error;
  };

  void start_workers();
  std::shared_ptr<void> make(std::uint64_t number, base::Deadline deadline);
  std::shared_ptr<void> wait_for_batch();
  std::shared_ptr<void> next_on_device();
  void prefetch_to_device();

  std::shared_ptr<LoaderCore> loader_;
  BatchPlan plan_;
  LoaderPosition start_;
  std::uint64_t num_taken_ = 0;
  bool failed_ = false;
  std::optional<PrefetchedBatch> prefetched_;  // number num_taken_, on its way to the device
  BatchMaker inline_maker_;
  std::unique_ptr<OrderedWorkers> workers_;
};

}  // namespace lockstep::data
