// The part of the loader that does not depend on the batch type.
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

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/visit_tensors.h"

namespace lockstep::comm {
class Group;
}  // namespace lockstep::comm

namespace lockstep::data {

struct LoaderOptions {
  std::int64_t batch_size = 1;  ///< samples per batch of one rank, 1 to 2^31
  std::uint64_t seed = 0;       ///< seed of the order; must be the same on all ranks
  bool shuffle = true;
  ShardMode mode = ShardMode::kPad;
  bool drop_last = false;  ///< omits a last batch that is not full; not allowed with kExact
  int num_workers = 0;     ///< threads that load batches, 0 to 256; 0: the calling thread loads each batch when it is
                           ///< requested, or one batch ahead if a device is set
  int prefetch = 2;        ///< batches per worker that are ready or being loaded, 1 to 1024
  /// Time limit for one batch of a worker, for stopping the workers, and for the device; more than 0.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// The device of the returned batches, for example Group::device(). The batches' host tensors (visit_tensors.h) go
  /// through pinned memory and are copied on a separate stream while the previous batch is in use. Up to three batches
  /// are on the device at a time: in use, returned, and being copied. If a program never synchronizes with the GPU, the
  /// loader blocks instead of exceeding this number.
  at::Device device = at::kCPU;
};

/// Returns whether several ranks draw the same number of batches, so that comparing their counts detects a rank that is
/// out of step.
bool has_equal_batch_counts(DataShard shard, const LoaderOptions& options);

namespace detail {

/// Returns the function that LoaderCore calls for each batch, so that `world` compares the ranks' batches. Returns null
/// if the ranks draw different numbers of batches.
std::function<void(const LoaderPosition&)> make_batch_counter(const comm::Group& world, const LoaderOptions& options);

}  // namespace detail

/// A sample could not be loaded. what() is "sample INDEX: " and the message of the dataset's exception, which is
/// nested.
class SampleError : public base::Error {
 public:
  SampleError(std::uint64_t index, base::Cause cause, const std::string& message)
      : base::Error(cause, message), index_(index) {}
  std::uint64_t index() const { return index_; }

 private:
  std::uint64_t index_;
};

/// Throws SampleError with the current exception nested; must be called inside a catch block. `num_samples` > 1 means
/// that the dataset loaded several samples at once, the first of which is `index`.
[[noreturn]] void throw_sample_error(std::uint64_t index, std::size_t num_samples = 1);

/// Loads a batch of the samples with these dataset indices. Returns null if a stop is requested before the batch is
/// complete.
using BatchMaker =
    std::function<std::shared_ptr<void>(const std::vector<std::size_t>& indices, const std::stop_token& stop)>;

/// Calls visit_tensors() for a batch whose type is erased.
using BatchVisitor = std::function<void(void* batch, const TensorVisitor& visit)>;

class BatchIterator;
class DevicePrefetcher;
class OrderedWorkers;

/// The part of Loader<Batch> that does not depend on Batch. Not thread-safe.
class LoaderCore : public std::enable_shared_from_this<LoaderCore> {
 public:
  /// `make_batch_maker` is called once per epoch for each thread that loads batches, `on_batch` for each batch that is
  /// returned. `visitor` visits the tensors of a batch. Throws UsageError if an option is out of range.
  LoaderCore(std::uint64_t num_samples, DataShard shard, const LoaderOptions& options,
             std::function<BatchMaker(std::uint64_t epoch)> make_batch_maker, BatchVisitor visitor,
             std::function<void(const LoaderPosition&)> on_batch);
  ~LoaderCore();

  /// The number of batches of this rank in a complete epoch.
  std::uint64_t batches_per_epoch() const { return plan(0, 0).num_batches(); }
  /// Starts a pass over `epoch`: at the restored position if that is in this epoch, otherwise at the beginning.
  std::shared_ptr<BatchIterator> start(std::uint64_t epoch);
  /// Starts a pass over the batches that remain of the current epoch, or over the next epoch if none remains.
  std::shared_ptr<BatchIterator> resume();
  /// The epoch whose batches resume() would draw.
  std::uint64_t next_epoch() const;

  bool is_exact() const {
    return options_.mode != ShardMode::kPad ||
           position_.num_samples % static_cast<std::uint64_t>(sampler_.shard().size) == 0;
  }
  const LoaderOptions& options() const { return options_; }
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
  std::unique_ptr<DevicePrefetcher> prefetcher_;  // null if batches stay on the host
};

/// One pass over an epoch, or over the rest of one. The destructor stops the worker threads.
class BatchIterator {
 public:
  BatchIterator(std::shared_ptr<LoaderCore> loader, BatchPlan plan, const LoaderPosition& start);
  ~BatchIterator();

  /// Returns the next batch; null after the last one and after an error. With worker threads, blocks at most
  /// LoaderOptions::timeout, then throws TimeoutError; with num_workers = 0, loads the batch on the calling thread,
  /// without a limit.
  std::shared_ptr<void> next();
  /// The batches of this pass. May be read while another thread calls next().
  const BatchPlan& plan() const { return plan_; }
  std::uint64_t size() const { return plan_.num_batches(); }
  /// The number of samples of the batch that was returned last.
  std::uint64_t num_samples() const { return num_taken_ == 0 ? 0 : plan_.num_samples(num_taken_ - 1); }
  /// The dataset indices of the batch that was returned last.
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
  std::optional<PrefetchedBatch> prefetched_;  // batch number num_taken_, while it is copied to the device
  BatchMaker inline_maker_;
  std::unique_ptr<OrderedWorkers> workers_;
};

}  // namespace lockstep::data
