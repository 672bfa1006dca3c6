#include "lockstep/comm/reducers/sparse_average.h"

#include <ATen/ATen.h>

#include "lockstep/base/error.h"

namespace lockstep::comm::reducers {
namespace {

/// Concatenates the ranks' rows. `rows` is [n, ...], with the n of each rank in `counts`. All ranks send as many rows
/// as the largest n.
at::Tensor gather_rows(const at::Tensor& rows, const std::vector<std::int64_t>& counts, HookContext& context) {
  const std::int64_t largest = *std::max_element(counts.begin(), counts.end());
  std::vector<std::int64_t> shape = rows.sizes().vec();
  shape[0] = largest;
  at::Tensor padded = at::zeros(shape, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  shape[0] = largest * static_cast<std::int64_t>(counts.size());
  at::Tensor all = at::empty(shape, rows.options());
  const PendingPtr pending = context.all_gather(all, padded);
  context.wait(*pending);
  std::vector<at::Tensor> parts;
  for (std::size_t r = 0; r < counts.size(); ++r)
    parts.push_back(all.narrow(0, static_cast<std::int64_t>(r) * largest, counts[r]));
  return at::cat(parts);
}

}  // namespace

at::Tensor sum_sparse(const at::Tensor& mine, const at::Tensor& example, double scale, HookContext& context) {
  const at::Tensor own = mine.defined() ? mine.coalesce() : at::Tensor();
  const std::int64_t count = own.defined() ? own._nnz() : 0;
  const std::int64_t own_dims = own.defined() ? own.sparse_dim() : 0;
  const at::Tensor counts_and_dims = at::tensor({count, own_dims}, at::kLong);
  at::Tensor all_counts_and_dims = at::empty({2 * context.size()}, at::kLong);
  const PendingPtr pending = context.all_gather(all_counts_and_dims, counts_and_dims);
  context.wait(*pending);
  std::vector<std::int64_t> counts;
  std::int64_t dims = 1;
  for (int r = 0; r < context.size(); ++r) {
    counts.push_back(all_counts_and_dims[2 * r].item<std::int64_t>());
    dims = std::max(dims, all_counts_and_dims[2 * r + 1].item<std::int64_t>());
  }
  std::vector<std::int64_t> value_shape{count};
  for (std::int64_t d = dims; d < example.dim(); ++d) value_shape.push_back(example.size(d));
  const auto value_options = example.options().requires_grad(std::nullopt);
  const at::Tensor indices =
      own.defined() ? own._indices().t().contiguous() : at::empty({0, dims}, value_options.dtype(at::kLong));
  const at::Tensor values = own.defined() ? own._values().mul(scale) : at::empty(value_shape, value_options);
  const at::Tensor all_indices = gather_rows(indices, counts, context);
  const at::Tensor all_values = gather_rows(values.contiguous(), counts, context);
  return at::sparse_coo_tensor(all_indices.t(), all_values, example.sizes(), value_options.layout(at::kSparse))
      .coalesce();
}

void throw_sparse_gradient(const std::string& parameter) {
  throw base::UsageError("the gradient of " + parameter + " is sparse; a fused optimizer requires dense gradients",
                         "create the embedding with sparse(false), or use an optimizer of torch::optim");
}

}  // namespace lockstep::comm::reducers
