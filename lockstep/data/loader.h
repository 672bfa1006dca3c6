// Batches for a training loop: every rank its own part, a new order each epoch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/group.h"
#include "lockstep/data/collate.h"
#include "lockstep/data/loader_core.h"
#include "lockstep/data/visit_tensors.h"

namespace lockstep::data {

/// One way through an epoch. A range that can be walked once, by one thread:
///   for (auto& batch : loader.epoch(3)) ...
/// Leaving the loop early stops the worker threads; that waits for as long as the dataset needs for one sample.
template <typename Batch>
class Epoch {
 public:
  class Iterator {
   public:
    explicit Iterator(BatchIterator& batches) : batches_(&batches) { ++*this; }
    Batch& operator*() const { return *static_cast<Batch*>(batch_.get()); }
    Batch* operator->() const { return static_cast<Batch*>(batch_.get()); }
    Iterator& operator++() {
      batch_ = nullptr;  // the caller is done with it: its memory serves the next one
      batch_ = batches_->next();
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

   private:
    BatchIterator* batches_;
    std::shared_ptr<void> batch_;
  };

  explicit Epoch(std::unique_ptr<BatchIterator> batches) : batches_(std::move(batches)) {}

  /// Waits for the first batch, at most LoaderOptions::timeout, as ++ does for the others. Both throw SampleError when
  /// the dataset threw, and TimeoutError.
  Iterator begin() { return Iterator(*batches_); }
  std::default_sentinel_t end() const { return {}; }
  /// Batches that this rank will see: fewer than batches_per_epoch() after restore().
  std::uint64_t size() const { return batches_->size(); }
  /// The indices into the dataset of the batch that was handed out last; none before the first.
  std::vector<std::size_t> indices() const { return batches_->indices(); }

 private:
  std::unique_ptr<BatchIterator> batches_;
};

/// Made by make_loader(). Copies share one state. One thread uses it.
template <typename Batch>
class Loader {
 public:
  explicit Loader(std::shared_ptr<LoaderCore> core) : core_(std::move(core)) {}

  /// The batches of epoch number `epoch`: after restore() to a position in this epoch those that remain, else all.
  Epoch<Batch> epoch(std::uint64_t epoch) { return Epoch<Batch>(core_->start(epoch)); }
  /// Batches of this rank in a whole epoch.
  std::uint64_t batches_per_epoch() const { return core_->batches_per_epoch(); }

  /// Whether ranks together see every sample at most once an epoch: not where some come twice so that all have equally
  /// many.
  bool is_exact() const { return core_->is_exact(); }

  /// Where the data stands: the batch that the loop holds counts as drawn. The same on all ranks between two steps.
  const LoaderPosition& position() const { return core_->position(); }
  /// Goes on there, in this world whatever the size of the one that saved it, when epoch(position.epoch) is called
  /// next. Throws UsageError when the position is of another dataset, seed or order.
  void restore(const LoaderPosition& position) { core_->restore(position); }

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

// A dataset with its own way to make a batch (data::Mnist, or torch's datasets mapped with Stack<>).
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
    if (!dataset.size()) throw base::UsageError("the dataset does not know its size; allowed are datasets with a size");
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

inline std::function<void(const LoaderPosition&)> make_batch_counter(const comm::Group& world,
                                                                     const LoaderOptions& options) {
  if (!has_equal_batch_counts({world.rank(), world.size()}, options)) return nullptr;
  return [group = world, mode = options.mode](const LoaderPosition& position) mutable {
    group.count_batch(order_fingerprint(position, mode));
  };
}

template <typename D>
Loader<DatasetBatch<D>> make_loader(D dataset, DataShard shard, const LoaderOptions& options,
                                    std::function<void(const LoaderPosition&)> on_batch) {
  if constexpr (requires { D::is_stateful; })
    static_assert(!D::is_stateful, "a stateful dataset decides itself what comes next; a Loader needs get(index)");
  static_assert(std::is_copy_constructible_v<D>, "each worker thread has a copy of the dataset: it must be copyable");
  const std::uint64_t num_samples = dataset_size(dataset);
  auto shared = std::make_shared<const D>(std::move(dataset));
  const auto make_batch_maker = [shared](std::uint64_t epoch) -> BatchMaker {
    // std::function wants a copyable target; the dataset itself is copied once a thread.
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

/// A loader of `dataset` for this rank of `world`. All ranks make it alike. Where all ranks draw equally many batches
/// (kPad, kDrop) each batch is counted in the group, so that ranks which are not at the same batch are told so instead
/// of averaging gradients of different steps; to walk a dataset on one rank alone, use DataShard{} below.
///
/// A dataset has get(index) or get_batch(indices), and size(): a torch::data::datasets::Dataset, one mapped with
/// transforms, or a class of your own. It is copied once for each worker thread and epoch (as libtorch's DataLoader
/// does), so get() need not be thread-safe, but what copies share must be. A copy that has set_epoch(epoch) is told the
/// epoch before its first sample. Tensors in samples are stacked: see CollatedBatch in collate.h.
///
/// The batches are the same ones in the same order whatever num_workers is. Randomness inside get() should be drawn
/// from its index and the epoch (SampleRng); a generator that threads share is used in an order that depends on
/// timing.
///
/// With LoaderOptions::device batches are on that device, and their copies were on their way before they were asked
/// for: use them on the stream that was current when they were handed out, by the thread that drew them, or order
/// others behind it. The host waits for no copy, and for the device only when that is two batches behind. What a copy
/// throws comes out of the loop as it is.
///
/// Throws UsageError for a dataset without samples and for an option outside its range.
template <MapDataset D>
auto make_loader(D dataset, const comm::Group& world, const LoaderOptions& options = {}) {
  return detail::make_loader(std::move(dataset), {world.rank(), world.size()}, options,
                             detail::make_batch_counter(world, options));
}

/// The same from a plain function: sample(i) for i in [0, num_samples).
template <typename F>
  requires std::is_invocable_v<F&, std::size_t>
auto make_loader(std::uint64_t num_samples, F sample, const comm::Group& world, const LoaderOptions& options = {}) {
  return make_loader(detail::FunctionDataset<F>{num_samples, std::move(sample)}, world, options);
}

/// The same for a part that is named by hand and known to no group: DataShard{} is all of the dataset, on this rank
/// alone.
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
