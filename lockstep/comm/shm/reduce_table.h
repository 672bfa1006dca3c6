// The kernels of reduce() and convert(), compiled for each instruction set.
#pragma once

#include "lockstep/base/simd/cpu_features.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm::shm {

struct ReduceTable {
  void (*reduce)(const Reduction&);
  void (*convert)(const Conversion&);  ///< between different dtypes
};

/// Returns the kernels for `set`, which the CPU must support.
const ReduceTable& reduce_table(base::simd::InstructionSet set);

/// Aborts: no kernel has this dtype. Group accepts only dtypes that have one.
[[noreturn]] void fail_reduce_dtype(at::ScalarType dtype);

// reduce_kernels.h defines one of these for each instruction set.
namespace baseline {
extern const ReduceTable kTable;
}
namespace avx2 {
extern const ReduceTable kTable;
}
namespace avx512 {
extern const ReduceTable kTable;
}

}  // namespace lockstep::comm::shm
