// Mean and spread of each channel, of one rank's part of a batch and of all ranks' together.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

/// A row is float64[2 * channels + 1] on the CPU: each channel's mean, each channel's sum of squared deviations from
/// it, and of how many values each is. All of a row of no values are zero.
at::Tensor pack_moments(const at::Tensor& input);

struct Moments {
  at::Tensor mean;                ///< float64[channels]
  at::Tensor squared_deviations;  ///< float64[channels]: the sum of squared deviations from the mean
  std::int64_t count = 0;         ///< values a channel
};

/// Of all rows of float64[ranks, 2 * channels + 1] together, joined one after the other as Chan, Golub and LeVeque do
/// ("Updating formulae and a pairwise algorithm for computing sample variances", 1979): nothing is lost where means are
/// large beside deviations, as it is in the mean of squares less the square of the mean. The bits depend on the rows
/// alone. Pure.
Moments combine_moments(const at::Tensor& rows);

/// What statistics of `dtype` are computed in: float64 for float64, else float32.
at::ScalarType statistics_dtype(at::ScalarType dtype);

}  // namespace lockstep::nn
