// Per-channel mean and variance of one rank's batch, and their combination over all ranks.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

/// Returns a row float64[2 * channels + 1] on the CPU: the mean of each channel, the sum of squared deviations of each
/// channel, and the number of values per channel. All entries are zero if there are no values.
at::Tensor pack_moments(const at::Tensor& input);

struct Moments {
  at::Tensor mean;                ///< float64[channels]
  at::Tensor squared_deviations;  ///< float64[channels]: the sum of squared deviations from the mean
  std::int64_t count = 0;         ///< values per channel
};

/// Combines the rows of float64[ranks, 2 * channels + 1] one after the other with the update formula of Chan, Golub and
/// LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979). Unlike the mean of
/// squares minus the square of the mean, it does not lose digits if means are large compared with deviations. The bits
/// depend on the rows alone. Pure.
Moments combine_moments(const at::Tensor& rows);

/// The dtype in which statistics of inputs of `dtype` are computed: float64 for float64, otherwise float32.
at::ScalarType statistics_dtype(at::ScalarType dtype);

}  // namespace lockstep::nn
