#include "lockstep/checkpoint/torch_file/storage_layout.h"

#include <torch/types.h>

#include <algorithm>
#include <map>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/torch_file/torch_dtype.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

at::Tensor materialize(const at::Tensor& tensor) {
  if (!tensor.defined()) throw base::UsageError("cannot save a tensor that is undefined");
  if (!find_torch_dtype(tensor.scalar_type()) || tensor.layout() != c10::kStrided || tensor.is_meta())
    throw base::UsageError(std::string("cannot save a tensor of dtype ") + c10::toString(tensor.scalar_type()) +
                           (tensor.layout() == c10::kStrided ? "" : ", which is sparse") +
                           (tensor.is_meta() ? ", which has no memory" : "") + "; expected a dense tensor of " +
                           torch_dtype_names());
  const torch::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg();
}

// Returns the number of elements from the first to the last one in memory, including gaps.
std::int64_t num_spanned_elements(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last + 1;
}

}  // namespace

StorageLayout::StorageLayout(const std::vector<at::Tensor>& tensors) : tensors_(tensors.size()) {
  std::vector<std::vector<TensorSpan>> groups;
  std::map<std::pair<const void*, c10::ScalarType>, std::vector<TensorSpan>> by_memory;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor tensor = materialize(tensors[i]);
    if (tensor.numel() == 0)
      groups.push_back(std::vector<TensorSpan>{TensorSpan{tensor, i, 0, 0}});
    else
      by_memory[{tensor.storage().unsafeGetStorageImpl(), tensor.scalar_type()}].push_back(
          {tensor, i, tensor.storage_offset(), tensor.storage_offset() + num_spanned_elements(tensor)});
  }
  for (auto& [memory, tensor_spans] : by_memory) {
    std::stable_sort(tensor_spans.begin(), tensor_spans.end(),
                     [](const TensorSpan& a, const TensorSpan& b) { return a.begin < b.begin; });
    std::int64_t end = -1;
    for (TensorSpan& tensor_span : tensor_spans) {
      if (tensor_span.begin >= end) groups.emplace_back();
      end = std::max(end, tensor_span.end);
      groups.back().push_back(std::move(tensor_span));
    }
  }
  // Sorts by tensor number, so that the file does not depend on addresses.
  const auto first = [](const std::vector<TensorSpan>& tensor_spans) {
    return std::min_element(tensor_spans.begin(), tensor_spans.end(),
                            [](const TensorSpan& a, const TensorSpan& b) { return a.number < b.number; })
        ->number;
  };
  std::sort(groups.begin(), groups.end(), [&](const auto& a, const auto& b) { return first(a) < first(b); });
  for (const auto& tensor_spans : groups) add_storage(tensor_spans);
}

void StorageLayout::add_storage(const std::vector<TensorSpan>& tensor_spans) {
  const torch::NoGradGuard no_grad;
  const std::string key = std::to_string(storages_.size());
  const TensorSpan& first = tensor_spans.front();
  std::int64_t end = 0;
  for (const TensorSpan& tensor_span : tensor_spans) end = std::max(end, tensor_span.end);
  const std::int64_t num_elements = end - first.begin;
  const auto make_stored = [&](const at::Tensor& tensor, std::int64_t offset, std::int64_t number) {
    return StoredTensor{key, static_cast<std::uint64_t>(number), offset, tensor.sizes().vec(), tensor.strides().vec()};
  };
  if (tensor_spans.size() == 1 && num_elements > first.tensor.numel()) {
    const at::Tensor dense = first.tensor.detach().contiguous();
    tensors_[first.number] = make_stored(dense, 0, dense.numel());
    return storages_.push_back(dense.view(-1));
  }
  for (const TensorSpan& tensor_span : tensor_spans)
    tensors_[tensor_span.number] = make_stored(tensor_span.tensor, tensor_span.begin - first.begin, num_elements);
  storages_.push_back(torch::empty({0}, first.tensor.options().requires_grad(false))
                          .set_(first.tensor.storage(), first.begin, {num_elements}, {1}));
}

at::Tensor StorageLayout::storage(std::size_t number) const { return storages_[number].to(c10::kCPU); }

}  // namespace lockstep::checkpoint::inline torch_file
