// The moments of batches, and the autograd function of SyncBatchNorm and of converted BatchNorm modules. Private to
// nn/.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "lockstep/comm/group.h"

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

/// Arguments besides input, weight and bias. The running statistics may be undefined; otherwise they are updated to
/// (1 - momentum) * running + momentum * statistics of the whole batch.
struct SyncBatchNormArgs {
  comm::Group group;
  std::string name;  // of the module, in errors
  at::Tensor running_mean;
  at::Tensor running_var;
  double momentum;
  double eps;
};

/// Normalises `input` (N, C, ...) by the mean and variance of all ranks' inputs. A collective: blocks until all ranks
/// have called it, in one all_gather here and, if the input requires a gradient, in one all_reduce in backward().
/// `weight` and `bias` may be undefined. Throws UsageError on every rank if all ranks together have fewer than two
/// values per channel.
at::Tensor apply_sync_batch_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                 const SyncBatchNormArgs& norm);

}  // namespace lockstep::nn
