// Assigns the tensors of a file to storages, and determines which parts of their memory are written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lockstep/checkpoint/torch_file/pickler.h"

namespace lockstep::checkpoint::inline torch_file {

class StorageLayout {
 public:
  /// Tensors that overlap in memory share one storage, which reaches from the first to the last of their elements;
  /// every other tensor has its own. A tensor with gaps between its elements that shares no memory is stored densely.
  /// Throws UsageError for tensors that a file cannot hold.
  explicit StorageLayout(const std::vector<at::Tensor>& tensors);

  /// Returns the location of tensor number `number` of the constructor's list.
  const StoredTensor& stored(std::size_t number) const { return tensors_[number]; }

  std::size_t num_storages() const { return storages_.size(); }
  /// Returns the contents of storage number `number` as a one-dimensional tensor on the CPU; copies it if it is on a
  /// device.
  at::Tensor storage(std::size_t number) const;

 private:
  struct TensorSpan {
    at::Tensor tensor;
    std::size_t number;       // index of the tensor in the list
    std::int64_t begin, end;  // element range in its memory; 0 and 0 if it is empty
  };
  void add_storage(const std::vector<TensorSpan>& tensor_spans);

  std::vector<StoredTensor> tensors_;
  std::vector<at::Tensor> storages_;  // views on the original devices
};

}  // namespace lockstep::checkpoint::inline torch_file
