// The kernels of each instruction set. Call only those that the processor supports.
#pragma once

#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {

namespace baseline {
void update(const KernelArgs& args, const SgdScalars& scalars);
void update(const KernelArgs& args, const AdamScalars& scalars);
void update(const KernelArgs& args, const AdagradScalars& scalars);
void update(const KernelArgs& args, const LambScalars& scalars);
void update(const KernelArgs& args, const LarsScalars& scalars);
SquaredNorms measure_norms(const KernelArgs& args, const LambScalars& scalars);
SquaredNorms measure_norms(const KernelArgs& args, const LarsScalars& scalars);
double sum_of_squares(const KernelArgs& args);
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count);
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor);
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max);
void update_ema(at::ScalarType dtype, void* average, const void* data, std::size_t count, double decay);
}  // namespace baseline
#if defined(__x86_64__)
namespace avx2 {  // requires avx2 and f16c
void update(const KernelArgs& args, const SgdScalars& scalars);
void update(const KernelArgs& args, const AdamScalars& scalars);
void update(const KernelArgs& args, const AdagradScalars& scalars);
void update(const KernelArgs& args, const LambScalars& scalars);
void update(const KernelArgs& args, const LarsScalars& scalars);
SquaredNorms measure_norms(const KernelArgs& args, const LambScalars& scalars);
SquaredNorms measure_norms(const KernelArgs& args, const LarsScalars& scalars);
double sum_of_squares(const KernelArgs& args);
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count);
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor);
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max);
void update_ema(at::ScalarType dtype, void* average, const void* data, std::size_t count, double decay);
}  // namespace avx2
namespace avx512 {  // requires avx512f, avx512bw, avx512vl and avx512dq
void update(const KernelArgs& args, const SgdScalars& scalars);
void update(const KernelArgs& args, const AdamScalars& scalars);
void update(const KernelArgs& args, const AdagradScalars& scalars);
void update(const KernelArgs& args, const LambScalars& scalars);
void update(const KernelArgs& args, const LarsScalars& scalars);
SquaredNorms measure_norms(const KernelArgs& args, const LambScalars& scalars);
SquaredNorms measure_norms(const KernelArgs& args, const LarsScalars& scalars);
double sum_of_squares(const KernelArgs& args);
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count);
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor);
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max);
void update_ema(at::ScalarType dtype, void* average, const void* data, std::size_t count, double decay);
}  // namespace avx512
#endif

}  // namespace lockstep::optim
