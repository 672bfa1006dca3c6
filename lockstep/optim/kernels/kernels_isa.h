// The loops, compiled for each instruction set. What the machine lacks must not be called.
#pragma once

#include "lockstep/optim/kernels/kernels.h"

namespace lockstep::optim {

namespace baseline {
void update(const Run& run, const SgdRule& rule);
void update(const Run& run, const AdamRule& rule);
void update(const Run& run, const AdagradRule& rule);
void update(const Run& run, const LambRule& rule);
void update(const Run& run, const LarsRule& rule);
Squares measure(const Run& run, const LambRule& rule);
Squares measure(const Run& run, const LarsRule& rule);
double sum_of_squares(const Run& run);
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count);
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor);
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max);
void blend(at::ScalarType dtype, void* average, const void* data, std::size_t count, double keep);
}  // namespace baseline
#if defined(__x86_64__)
namespace avx2 {  // needs avx2, f16c
void update(const Run& run, const SgdRule& rule);
void update(const Run& run, const AdamRule& rule);
void update(const Run& run, const AdagradRule& rule);
void update(const Run& run, const LambRule& rule);
void update(const Run& run, const LarsRule& rule);
Squares measure(const Run& run, const LambRule& rule);
Squares measure(const Run& run, const LarsRule& rule);
double sum_of_squares(const Run& run);
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count);
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor);
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max);
void blend(at::ScalarType dtype, void* average, const void* data, std::size_t count, double keep);
}  // namespace avx2
namespace avx512 {  // needs avx512f, bw, vl, dq
void update(const Run& run, const SgdRule& rule);
void update(const Run& run, const AdamRule& rule);
void update(const Run& run, const AdagradRule& rule);
void update(const Run& run, const LambRule& rule);
void update(const Run& run, const LarsRule& rule);
Squares measure(const Run& run, const LambRule& rule);
Squares measure(const Run& run, const LarsRule& rule);
double sum_of_squares(const Run& run);
double sum_of_squares(at::ScalarType dtype, const void* data, std::size_t count);
void scale(at::ScalarType dtype, void* data, std::size_t count, double factor);
void clamp(at::ScalarType dtype, void* data, std::size_t count, double max);
void blend(at::ScalarType dtype, void* average, const void* data, std::size_t count, double keep);
}  // namespace avx512
#endif

}  // namespace lockstep::optim
