#include "lockstep/comm/shm/reduce.h"

#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/comm/shm/reduce_table.h"

namespace lockstep::comm::shm {
namespace {

const ReduceTable& chosen_table() {
  static const ReduceTable& table = reduce_table(base::simd::best_instruction_set());
  return table;
}

}  // namespace

const ReduceTable& reduce_table(base::simd::InstructionSet set) {
  return base::simd::select(set, baseline::kTable, avx2::kTable, avx512::kTable);
}

void fail_reduce_dtype(at::ScalarType dtype) {
  base::check_failed(__FILE__, __LINE__, std::string("no reduction or conversion of ") + c10::toString(dtype));
}

void reduce(const Reduction& reduction) { chosen_table().reduce(reduction); }

void reduce_to(void* output, c10::ArrayRef<const void*> inputs, at::ScalarType dtype, ReduceOp op, std::size_t count,
               int divisor) {
  reduce({.dtype = dtype,
          .op = op,
          .inputs = inputs.data(),
          .num_inputs = inputs.size(),
          .outputs = &output,
          .num_outputs = 1,
          .count = count,
          .divisor = divisor});
}

void convert(const Conversion& conversion) {
  if (conversion.from != conversion.to) return chosen_table().convert(conversion);
  if (conversion.count > 0)
    std::memcpy(conversion.output, conversion.input, conversion.count * c10::elementSize(conversion.from));
}

}  // namespace lockstep::comm::shm
