// Where each tensor of a file lies: which share a storage, and what of their memory is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/checkpoint/torch_file/pickler.h"

namespace lockstep::checkpoint {

class StorageLayout {
 public:
  /// Tensors that overlap in memory get one storage, which reaches from the first of their elements to the last; all
  /// others one for themselves. One that has gaps between its elements, and shares none, is laid out without. Throws
  /// UsageError for those that a file cannot hold.
  explicit StorageLayout(const std::vector<at::Tensor>& tensors);

  /// Of the tensor that was given as number `number`.
  const StoredTensor& stored(std::size_t number) const { return tensors_[number]; }

  std::size_t num_storages() const { return storages_.size(); }
  /// The contents of storage "NUMBER": of one dimension, on the CPU. Copies what is elsewhere.
  at::Tensor storage(std::size_t number) const;

 private:
  struct TensorSpan {
    at::Tensor tensor;
    std::size_t number;       // of the tensor in its list
    std::int64_t begin, end;  // elements in its memory; 0 and 0 when it has none
  };
  void add_storage(const std::vector<TensorSpan>& tensor_spans);

  std::vector<StoredTensor> tensors_;
  std::vector<at::Tensor> storages_;  // views, on their devices
};

}  // namespace lockstep::checkpoint
