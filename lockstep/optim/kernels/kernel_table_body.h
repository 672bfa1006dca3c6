// The table of kernels of one instruction set. The including file defines LOCKSTEP_ISA, the name of a namespace, and
// includes all other headers (see element_types.h).
#pragma once

#include "lockstep/optim/kernels/norm_kernels_body.h"
#include "lockstep/optim/kernels/tensor_kernels_body.h"
#include "lockstep/optim/kernels/update_kernels_body.h"

namespace lockstep::optim::kernels::LOCKSTEP_ISA {

constinit const KernelTable kTable{.sgd = update_sgd,
                                   .adam = update_adam,
                                   .adagrad = update_adagrad,
                                   .lamb = update_lamb,
                                   .lars = update_lars,
                                   .measure_lamb = measure_lamb,
                                   .measure_lars = measure_lars,
                                   .sum_of_squares = sum_of_squares,
                                   .tensor_sum_of_squares = tensor_sum_of_squares,
                                   .scale = scale,
                                   .clamp = clamp,
                                   .update_ema = update_ema};

}  // namespace lockstep::optim::kernels::LOCKSTEP_ISA
