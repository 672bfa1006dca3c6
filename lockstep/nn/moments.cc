// Computation and combination of per-channel moments.
#include "lockstep/nn/moments.h"

#include <ATen/Functions.h>

namespace lockstep::nn {

at::ScalarType statistics_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

at::Tensor pack_moments(const at::Tensor& input) {
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

Moments combine_moments(const at::Tensor& rows) {
  const std::int64_t channels = (rows.size(1) - 1) / 2;
  Moments all{at::zeros({channels}, at::kDouble), at::zeros({channels}, at::kDouble), 0};
  auto* const mean = all.mean.mutable_data_ptr<double>();
  auto* const squared_deviations = all.squared_deviations.mutable_data_ptr<double>();
  double count = 0;
  for (std::int64_t rank = 0; rank < rows.size(0); ++rank) {
    const auto* const row = rows.const_data_ptr<double>() + rank * rows.size(1);
    const double row_count = row[2 * channels];
    if (row_count == 0) continue;
    const double weight = row_count / (count + row_count);
    for (std::int64_t c = 0; c < channels; ++c) {
      const double delta = row[c] - mean[c];
      mean[c] += delta * weight;
      squared_deviations[c] += row[channels + c] + delta * delta * count * weight;
    }
    count += row_count;
  }
  all.count = static_cast<std::int64_t>(count);
  return all;
}

}  // namespace lockstep::nn
