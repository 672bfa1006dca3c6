// Loads batches for a training loop: each rank draws its own part of the dataset, in a new order in each epoch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <ranges>
#include <stop_token>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/stateful.h"
#include "lockstep/comm/group.h"
#include "lockstep/data/collate.h"
#include "lockstep/data/loader_core.h"
#include "lockstep/data/visit_tensors.h"

namespace lockstep::data {

/// An input iterator over the remaining batches of one epoch. Its constructor and operator++ block until the next batch
/// is ready: with worker threads at most LoaderOptions::timeout; with num_workers = 0, they load the batch on the
/// calling thread, without a limit. Both throw SampleError if the dataset threw, and TimeoutError. A batch is valid
/// until operator++; the copies of an iterator advance together.
///
/// When the last copy, and the Epoch if there is one, is destroyed before the end, for example because the program
/// leaves a loop early, the worker threads stop. This blocks until each has returned from its current call of get() or
/// get_batch(), at most LoaderOptions::timeout.
template <typename Batch>
class LoaderIterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;

  explicit LoaderIterator(std::shared_ptr<BatchIterator> batches) : batches_(std::move(batches)) { ++*this; }
  Batch& operator*() const { return *static_cast<Batch*>(batch_.get()); }
  Batch* operator->() const { return static_cast<Batch*>(batch_.get()); }
  LoaderIterator& operator++() {
    batch_ = nullptr;  // the caller no longer uses the batch, so the next one can reuse its memory
    batch_ = batches_->next();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

 private:
  std::shared_ptr<BatchIterator> batches_;
  std::shared_ptr<void> batch_;
};

/// One pass over an epoch: an input range that one thread can iterate once.
///   for (auto& batch : loader.epoch(3)) ...
template <typename Batch>
class Epoch {
 public:
  explicit Epoch(std::shared_ptr<BatchIterator> batches) : batches_(std::move(batches)) {}

  /// Throws UsageError if it was called before: the batches are gone.
  LoaderIterator<Batch> begin() {
    if (std::exchange(has_begun_, true))
      throw base::UsageError(
          "Epoch: a second loop over the same Epoch; expected one loop, because its batches are gone",
          "call loader.epoch() again for another pass");
    return LoaderIterator<Batch>(batches_);
  }
  std::default_sentinel_t end() const { return {}; }
  /// The number of batches in this pass: fewer than batches_per_epoch() after load_state_dict().
  std::uint64_t size() const { return batches_->size(); }
  /// The number of samples of the batch that was returned last; 0 before the first.
  std::uint64_t num_samples() const { return batches_->num_samples(); }
  /// The dataset indices of the batch that was returned last; empty before the first.
  std::vector<std::size_t> indices() const { return batches_->indices(); }

 private:
  std::shared_ptr<BatchIterator> batches_;
  bool has_begun_ = false;
};

/// Created by make_loader(). Copies share one state. Not thread-safe.
template <typename Batch>
class Loader final : public checkpoint::Stateful {
 public:
  explicit Loader(std::shared_ptr<LoaderCore> core) : core_(std::move(core)) {}

  /// Returns the batches of epoch number `epoch`: the remaining ones if load_state_dict() set a position in this epoch,
  /// otherwise all.
  Epoch<Batch> epoch(std::uint64_t epoch) { return Epoch<Batch>(core_->start(epoch)); }

  /// The loader as a range: `for (auto& batch : loader)` iterates over the remaining batches of the epoch in
  /// position(), or over the next epoch if no batch remains. The first loop is thus epoch(0), each complete loop is
  /// followed by that over the next epoch, and a loop that follows a break or load_state_dict() continues at the next
  /// batch. epoch(n) instead begins epoch n anew after a break, and the loop that follows it continues from there.
  LoaderIterator<Batch> begin() { return LoaderIterator<Batch>(core_->resume()); }
  std::default_sentinel_t end() const { return {}; }
  /// Returns the numbers of the epochs below `num_epochs` that have batches left after the current position: all of
  /// them in a new training, the rest in one that resumes, and none after its end.
  ///   for (const std::uint64_t epoch : loader.remaining_epochs(10))
  ///     for (auto& batch : loader.epoch(epoch)) ...
  auto remaining_epochs(std::uint64_t num_epochs) const {
    const std::uint64_t first = core_->next_epoch();
    return std::views::iota(std::min(first, num_epochs), num_epochs);
  }

  /// The number of batches of this rank in a complete epoch.
  std::uint64_t batches_per_epoch() const { return core_->batches_per_epoch(); }

  const LoaderOptions& options() const { return core_->options(); }
  /// Returns whether all ranks together draw each sample at most once per epoch. False if some samples are drawn twice
  /// so that all ranks have the same number of them.
  bool is_exact() const { return core_->is_exact(); }

  /// The current position; the batch that the loop holds counts as drawn. Between two steps, the position is the same
  /// on all ranks.
  const LoaderPosition& position() const { return core_->position(); }
  /// Returns the current position.
  checkpoint::StateDict state_dict() const override { return to_state_dict(core_->position()); }
  /// Makes the next call of epoch(position().epoch) resume at the saved position, which may have been saved with
  /// another world size. Throws UsageError if the position belongs to another dataset, seed or order.
  void load_state_dict(const checkpoint::StateDict& state) override { core_->restore(position_from_state_dict(state)); }

  /// For the Trainer: the loader without the type of its batches.
  const std::shared_ptr<LoaderCore>& core() const { return core_; }

 private:
  std::shared_ptr<LoaderCore> core_;
};

namespace detail {

template <typename D>
concept HasGet = requires(D& d, std::size_t i) { d.get(i); };
template <typename D>
concept HasGetBatch = requires(D& d, const std::vector<std::size_t>& indices) { d.get_batch(indices); };

template <typename T>
inline constexpr bool is_vector = false;
template <typename T>
inline constexpr bool is_vector<std::vector<T>> = true;

// Returns whether the dataset's get_batch() returns a batch rather than a vector of samples (data::Mnist, or torch's
// datasets mapped with Stack<>).
template <typename D>
constexpr bool has_own_collate() {
  if constexpr (HasGetBatch<D>)
    return !is_vector<std::decay_t<decltype(std::declval<D&>().get_batch(std::vector<std::size_t>()))>>;
  else
    return false;
}

template <typename D>
auto make_batch(D& dataset, const std::vector<std::size_t>& indices, const std::stop_token& stop) {
  if constexpr (has_own_collate<D>() || !HasGet<D>) {
    using Made = std::decay_t<decltype(dataset.get_batch(indices))>;
    std::shared_ptr<Made> made;
    try {
      made = std::make_shared<Made>(dataset.get_batch(indices));
    } catch (...) {
      throw_sample_error(indices.front(), indices.size());
    }
    if constexpr (has_own_collate<D>())
      return made;
    else
      return std::make_shared<CollatedBatch<typename Made::value_type>>(collate(std::move(*made), indices));
  } else {
    using Sample = std::decay_t<decltype(dataset.get(indices[0]))>;
    using Batch = CollatedBatch<Sample>;
    std::vector<Sample> samples;
    samples.reserve(indices.size());
    for (const std::size_t index : indices) {
      if (stop.stop_requested()) return std::shared_ptr<Batch>();
      try {
        samples.push_back(dataset.get(index));
      } catch (...) {
        throw_sample_error(index);
      }
    }
    return std::make_shared<Batch>(collate(std::move(samples), indices));
  }
}

template <typename D>
using DatasetBatch = typename decltype(make_batch(std::declval<D&>(), {}, {}))::element_type;

template <typename D>
std::uint64_t dataset_size(const D& dataset) {
  if constexpr (requires { dataset.size().has_value(); }) {
    if (!dataset.size())
      throw base::UsageError("make_loader: the dataset has no size; expected a dataset whose size() returns a value");
    return *dataset.size();
  } else {
    return static_cast<std::uint64_t>(dataset.size());
  }
}

template <typename F>
struct FunctionDataset {
  std::uint64_t num_samples;
  F function;
  auto get(std::size_t index) { return function(index); }
  std::uint64_t size() const { return num_samples; }
};

template <typename D>
Loader<DatasetBatch<D>> make_loader(D dataset, DataShard shard, const LoaderOptions& options,
                                    std::function<void(const LoaderPosition&)> on_batch) {
  if constexpr (requires { D::is_stateful; })
    static_assert(!D::is_stateful, "a Loader requires get(index), which stateful datasets do not have");
  static_assert(std::is_copy_constructible_v<D>, "the dataset must be copyable: each worker thread has a copy");
  const std::uint64_t num_samples = dataset_size(dataset);
  auto shared = std::make_shared<const D>(std::move(dataset));
  const auto make_batch_maker = [shared](std::uint64_t epoch) -> BatchMaker {
    // std::function requires a copyable target, and the dataset itself is to be copied only once per thread.
    auto copy = std::make_shared<D>(*shared);
    if constexpr (requires { copy->set_epoch(epoch); }) copy->set_epoch(epoch);
    return [thread_dataset = std::move(copy)](const std::vector<std::size_t>& indices, const std::stop_token& stop) {
      return std::shared_ptr<void>(make_batch(*thread_dataset, indices, stop));
    };
  };
  const auto visitor = [](void* batch, const TensorVisitor& visit) {
    visit_tensors(*static_cast<DatasetBatch<D>*>(batch), visit);
  };
  return Loader<DatasetBatch<D>>(
      std::make_shared<LoaderCore>(num_samples, shard, options, make_batch_maker, visitor, std::move(on_batch)));
}

}  // namespace detail

template <typename D>
concept MapDataset = detail::HasGet<D> || detail::HasGetBatch<D>;

/// Creates a loader of `dataset` for this rank of `world`. All ranks must pass the same arguments. If all ranks draw
/// the same number of batches (kPad, kDrop), the group counts each batch, and ranks that are at different batches throw
/// DesyncError instead of averaging gradients of different steps. To iterate over a dataset on one rank only, use the
/// overload with DataShard{}.
///
/// A dataset has get(index) or get_batch(indices), and size(). It may be a torch::data::datasets::Dataset, one mapped
/// with transforms, or your own class. It is copied once per worker thread and epoch (as in libtorch's DataLoader), so
/// get() need not be thread-safe, but state that copies share must be. If the dataset has set_epoch(epoch), each copy
/// receives the epoch before its first sample. Tensors in samples are stacked: see CollatedBatch in collate.h.
///
/// The batches and their order do not depend on num_workers. Draw random numbers inside get() from the index and the
/// epoch (SampleRng): a generator that threads share is used in an order that depends on timing.
///
/// With LoaderOptions::device, batches are on that device, and the copy of a batch starts before the batch is
/// requested. Use a batch on the stream that was current when it was returned, on the thread that requested it, or
/// order other streams after that one. The host does not wait for a copy; it waits for the device only if the device is
/// two batches behind. An exception of a copy is rethrown unchanged when its batch is requested.
///
/// Throws UsageError if the dataset has no samples or if an option is out of range.
template <MapDataset D>
auto make_loader(D dataset, const comm::Group& world, const LoaderOptions& options = {}) {
  return detail::make_loader(std::move(dataset), {world.rank(), world.size()}, options,
                             detail::make_batch_counter(world, options));
}

/// Creates a loader of the samples sample(i) for i in [0, num_samples).
template <typename F>
  requires std::is_invocable_v<F&, std::size_t>
auto make_loader(std::uint64_t num_samples, F sample, const comm::Group& world, const LoaderOptions& options = {}) {
  return make_loader(detail::FunctionDataset<F>{num_samples, std::move(sample)}, world, options);
}

/// Creates a loader of an explicit shard, which no group counts. DataShard{} is the complete dataset, on this rank
/// only.
template <MapDataset D>
auto make_loader(D dataset, DataShard shard, const LoaderOptions& options = {}) {
  return detail::make_loader(std::move(dataset), shard, options, nullptr);
}

template <typename F>
  requires std::is_invocable_v<F&, std::size_t>
auto make_loader(std::uint64_t num_samples, F sample, DataShard shard, const LoaderOptions& options = {}) {
  return make_loader(detail::FunctionDataset<F>{num_samples, std::move(sample)}, shard, options);
}

}  // namespace lockstep::data
