#include "lockstep/nn/moments.h"

#include <ATen/Functions.h>

namespace lockstep::nn {

at::ScalarType statistics_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor moments_row(const at::Tensor& input) {
  const std::int64_t channels = input.size(1);
  const at::Tensor row = at::zeros({2 * channels + 1}, at::kDouble);
  if (input.numel() == 0) return row;
  const auto count = static_cast<double>(input.numel() / channels);
  const auto [mean, variance] = at::batch_norm_update_stats(input.to(statistics_dtype(input.scalar_type())), {}, {}, 0);
  row.narrow(0, 0, channels).copy_(mean);
  row.narrow(0, channels, channels).copy_(variance).mul_(count);
  row.narrow(0, 2 * channels, 1).fill_(count);
  return row;
}

Moments joined(const at::Tensor& rows) {
  const std::int64_t channels = (rows.size(1) - 1) / 2;
  Moments all{at::zeros({channels}, at::kDouble), at::zeros({channels}, at::kDouble), 0};
  auto* const mean = all.mean.mutable_data_ptr<double>();
  auto* const squares = all.squares.mutable_data_ptr<double>();
  double count = 0;
  for (std::int64_t rank = 0; rank < rows.size(0); ++rank) {
    const auto* const row = rows.const_data_ptr<double>() + rank * rows.size(1);
    const double more = row[2 * channels];
    if (more == 0) continue;
    const double share = more / (count + more);
    for (std::int64_t c = 0; c < channels; ++c) {
      const double apart = row[c] - mean[c];
      mean[c] += apart * share;
      squares[c] += row[channels + c] + apart * apart * count * share;
    }
    count += more;
  }
  all.count = static_cast<std::int64_t>(count);
  return all;
}

}  // namespace lockstep::nn
