// Reductions and dtype conversions over the memory of several ranks.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>

#include "lockstep/comm/interface/collective.h"

namespace lockstep::comm::shm {

/// Computes outputs[i][k] = (inputs[0][k] op inputs[1][k] op …) / divisor for k in [0, count) and every output, in this
/// order on every machine. A mean is a sum with a divisor. float16 and bfloat16 are reduced in float32 and rounded
/// once. For bool, a sum is a logical or and a product a logical and. An output may be one of the inputs. The dtypes
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
/// Converts between float32 and float16 or bfloat16, rounding to nearest, or copies if the dtypes are equal. The
/// buffers must not overlap.
struct Conversion {
  at::ScalarType from;
  at::ScalarType to;
  const void* input;
  void* output;
  std::size_t count;
};

// All functions use base::simd::best_instruction_set(). The bits of the result do not depend on it.
void reduce(const Reduction& reduction);
/// The same with one output.
void reduce_to(void* output, c10::ArrayRef<const void*> inputs, at::ScalarType dtype, ReduceOp op, std::size_t count,
               int divisor = 1);
void convert(const Conversion& conversion);

}  // namespace lockstep::comm::shm
