// Chooses the kernels of this process.
#include "lockstep/optim/kernels/kernels.h"

#include <string>

#include "lockstep/base/check.h"

namespace lockstep::optim::kernels {

const KernelTable& kernels(base::simd::InstructionSet set) {
  return base::simd::select(set, baseline::kTable, avx2::kTable, avx512::kTable);
}

const KernelTable& kernels() {
  static const KernelTable& chosen = kernels(base::simd::best_instruction_set());
  return chosen;
}

void fail_kernel_dtype(at::ScalarType dtype) {
  base::check_failed(__FILE__, __LINE__, std::string("no optimizer kernel for ") + c10::toString(dtype));
}

bool has_kernel(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

at::ScalarType state_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace lockstep::optim::kernels
