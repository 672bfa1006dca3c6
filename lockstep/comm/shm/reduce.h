// Sums and their kin over the memory of several ranks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>

#include "lockstep/comm/interface/collective.h"

namespace lockstep::comm {

/// outputs[i][k] = (inputs[0][k] op inputs[1][k] op …) / divisor, in this order whatever the machine, for k in [0,
/// count) and every output. A mean is a sum whose divisor the caller gives. Half and bfloat16 are added in float and
/// rounded once. Of bools, a sum is their or and a product their and. An output may be one of the inputs. The dtypes
/// are those of Collective.
struct Reduction {
  at::ScalarType dtype;
  ReduceOp op;
  const void* const* inputs;
  std::size_t num_inputs;
  void* const* outputs;
  std::size_t num_outputs;
  std::size_t count;
  int divisor = 1;
};
/// Between float and half or bfloat16, rounded to the nearest; or of one dtype, which copies. The buffers do not
/// overlap.
struct Conversion {
  at::ScalarType from;
  at::ScalarType to;
  const void* input;
  void* output;
  std::size_t count;
};

// Both use the widest vectors that this machine has; the bits are the same with all.
void reduce(const Reduction& reduction);
void convert(const Conversion& conversion);

}  // namespace lockstep::comm
