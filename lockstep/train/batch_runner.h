// A loader and the method of a module that takes its batches, without their types.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/data/loader.h"
#include "lockstep/train/step_log.h"

namespace lockstep::train {

class Batches {
 public:
  virtual ~Batches() = default;
  virtual std::int64_t batches_per_epoch() const = 0;
  /// Every sample once over all ranks, none twice.
  virtual bool is_exact() const = 0;
  virtual void begin(std::uint64_t epoch) = 0;
  /// Draws the next batch of the epoch that has begun; false after the last.
  virtual bool fetch_next() = 0;
  /// Stops its threads, if the epoch has not come to its end.
  virtual void end() = 0;
  virtual std::int64_t num_samples() const = 0;          ///< of the batch that was drawn
  virtual std::vector<std::size_t> indices() const = 0;  ///< into the dataset, likewise
  /// Batches of the epoch that has begun, drawn or not: fewer than batches_per_epoch() where restore() has put its
  /// beginning behind others.
  virtual std::int64_t batches_this_epoch() const = 0;
  virtual const data::LoaderPosition& position() const = 0;
  /// The next begin() of that epoch begins there. Throws UsageError for a position of other data.
  virtual void restore(const data::LoaderPosition& position) = 0;
  /// The module's own step with the batch that was drawn. Undefined when it gives nothing back.
  virtual at::Tensor step(StepLog& log) = 0;
  /// Tensors of floating point become `dtype`, as weights in lower precision want them.
  virtual void cast(at::ScalarType dtype) = 0;
};

template <typename Batch, typename Step>
class LoaderBatchRunner final : public Batches {
 public:
  LoaderBatchRunner(data::Loader<Batch> loader, Step step) : loader_(std::move(loader)), step_(std::move(step)) {}

  std::int64_t batches_per_epoch() const override { return static_cast<std::int64_t>(loader_.batches_per_epoch()); }
  bool is_exact() const override { return loader_.is_exact(); }
  void begin(std::uint64_t epoch) override {
    end();
    epoch_.emplace(loader_.epoch(epoch));
  }
  bool fetch_next() override {
    if (iterator_)
      ++*iterator_;
    else
      iterator_.emplace(epoch_->begin());
    return *iterator_ != std::default_sentinel;
  }
  void end() override {
    iterator_.reset();
    epoch_.reset();
  }
  std::int64_t num_samples() const override {
    std::int64_t count = 0;
    data::visit_tensors(**iterator_, [&](at::Tensor& tensor) {
      if (count == 0 && tensor.defined() && tensor.dim() > 0) count = tensor.size(0);
    });
    return count > 0 ? count : 1;
  }
  std::vector<std::size_t> indices() const override { return epoch_->indices(); }
  std::int64_t batches_this_epoch() const override { return static_cast<std::int64_t>(epoch_->size()); }
  const data::LoaderPosition& position() const override { return loader_.position(); }
  void restore(const data::LoaderPosition& position) override { loader_.restore(position); }
  at::Tensor step(StepLog& log) override {
    if constexpr (std::is_void_v<decltype(step_(**iterator_, log))>) {
      step_(**iterator_, log);
      return {};
    } else {
      return step_(**iterator_, log);
    }
  }
  void cast(at::ScalarType dtype) override {
    data::visit_tensors(**iterator_, [&](at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(dtype);
    });
  }

 private:
  data::Loader<Batch> loader_;
  Step step_;
  std::optional<data::Epoch<Batch>> epoch_;
  std::optional<typename data::Epoch<Batch>::Iterator> iterator_;
};

template <typename Batch, typename Step>
std::unique_ptr<Batches> make_batch_runner(data::Loader<Batch> loader, Step step) {
  return std::make_unique<LoaderBatchRunner<Batch, Step>>(std::move(loader), std::move(step));
}

}  // namespace lockstep::train
