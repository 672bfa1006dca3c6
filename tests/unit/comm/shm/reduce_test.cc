#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstring>

#include "lockstep/comm/shm/reduce_table.h"

namespace lockstep::comm::shm {
namespace {

using ReduceKernel = void (*)(const Reduction&);

/// Returns all kernels that this machine can run, with their names.
std::vector<std::pair<std::string, ReduceKernel>> all_kernels() {
  std::vector<std::pair<std::string, ReduceKernel>> kernels{{"chosen", &comm::shm::reduce}};
  for (const base::simd::InstructionSet set : base::simd::supported_instruction_sets())
    kernels.emplace_back(base::simd::name(set), reduce_table(set).reduce);
  return kernels;
}

at::Tensor run(ReduceKernel kernel, ReduceOp op, const std::vector<at::Tensor>& inputs) {
  const at::Tensor output = torch::empty_like(inputs[0]);
  std::vector<const void*> in;
  for (const at::Tensor& input : inputs) in.push_back(input.const_data_ptr());
  void* out = output.mutable_data_ptr();
  kernel({.dtype = output.scalar_type(),
          .op = op,
          .inputs = in.data(),
          .num_inputs = in.size(),
          .outputs = &out,
          .num_outputs = 1,
          .count = static_cast<std::size_t>(output.numel()),
          .divisor = op == ReduceOp::kMean ? static_cast<int>(inputs.size()) : 1});
  return output;
}

at::Tensor random_values(at::ScalarType dtype, std::int64_t count, int seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  if (dtype == at::kBool) return torch::rand({count}) < 0.5;
  if (at::isFloatingType(dtype)) return torch::randn({count}).to(dtype);
  return torch::randint(dtype == at::kByte ? 0 : -5, 6, {count}).to(dtype);
}

/// Reduces the inputs one after another, in their order. Returns the result that every kernel must compute.
at::Tensor reference(ReduceOp op, const std::vector<at::Tensor>& inputs) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto wide = [&](const at::Tensor& x) {
    return narrow ? x.to(at::kFloat) : dtype == at::kBool ? x.to(at::kByte) : x;
  };
  at::Tensor all = wide(inputs[0]).clone();
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    const at::Tensor next = wide(inputs[i]);
    if (op == ReduceOp::kMin)
      all = torch::minimum(all, next);
    else if (op == ReduceOp::kMax)
      all = torch::maximum(all, next);
    else if (op == ReduceOp::kProduct)
      all = all * next;
    else
      all = dtype == at::kBool ? torch::maximum(all, next) : all + next;
  }
  if (op == ReduceOp::kMean) all = all / static_cast<double>(inputs.size());
  return all.to(dtype);
}

TEST(Reduce, AllDtypesAndOpsReduceInRankOrder) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kChar, at::kByte, at::kBool})
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      if (op == ReduceOp::kMean && !at::isFloatingType(dtype)) continue;
      for (const int ranks : {1, 2, 3, 4, 7})
        for (const std::int64_t count : {1, 17, 1024, 5003}) {
          std::vector<at::Tensor> inputs;
          for (int r = 0; r < ranks; ++r) inputs.push_back(random_values(dtype, count, 31 * r + 1));
          const at::Tensor expected = reference(op, inputs);
          for (const auto& [name, kernel] : all_kernels())
            ASSERT_TRUE(run(kernel, op, inputs).equal(expected))
                << name << " " << c10::toString(dtype) << " " << comm::name(op) << ", " << ranks << " ranks, " << count
                << " elements";
        }
    }
}

TEST(Reduce, OutputsMayBeTheInputs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kByte, at::kBool})
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kProduct})
      for (const int ranks : {2, 3}) {
        if (op == ReduceOp::kMean && !at::isFloatingType(dtype)) continue;
        for (const auto& [name, kernel] : all_kernels()) {
          std::vector<at::Tensor> tensors;
          std::vector<void*> memory;
          for (int r = 0; r < ranks; ++r) {
            tensors.push_back(random_values(dtype, 3001, r));
            memory.push_back(tensors.back().mutable_data_ptr());
          }
          const at::Tensor expected = reference(op, tensors);
          kernel({.dtype = dtype,
                  .op = op,
                  .inputs = memory.data(),
                  .num_inputs = memory.size(),
                  .outputs = memory.data(),
                  .num_outputs = memory.size(),
                  .count = 3001,
                  .divisor = op == ReduceOp::kMean ? ranks : 1});
          for (const at::Tensor& tensor : tensors)
            ASSERT_TRUE(tensor.equal(expected))
                << name << " " << c10::toString(dtype) << " " << comm::name(op) << ", " << ranks;
        }
      }
}

TEST(Reduce, ReducedPrecisionSumsAreRoundedOnce) {
  // In bfloat16, 256 + 1 is 256. Only a sum in float32 counts all of the ones.
  std::vector<at::Tensor> inputs{torch::full({8}, 256.0f).to(at::kBFloat16)};
  for (int r = 0; r < 6; ++r) inputs.push_back(torch::ones({8}).to(at::kBFloat16));
  EXPECT_EQ(run(&comm::shm::reduce, ReduceOp::kSum, inputs)[0].item<float>(), 262);
  const at::Tensor nan = torch::full({8}, std::numeric_limits<float>::quiet_NaN()).to(at::kBFloat16);
  EXPECT_TRUE(run(&comm::shm::reduce, ReduceOp::kSum, {nan, nan}).isnan().all().item<bool>());
}

TEST(Convert, RoundsLikeTorch) {
  at::Tensor values = random_values(at::kFloat, 1037, 5) * 1000;
  values[3] = std::numeric_limits<float>::infinity();
  values[4] = std::numeric_limits<float>::quiet_NaN();
  values[5] = 1e30F;
  std::vector<void (*)(const Conversion&)> all{&comm::shm::convert};
  for (const base::simd::InstructionSet set : base::simd::supported_instruction_sets())
    all.push_back(reduce_table(set).convert);
  for (const auto& convert : all)
    for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
      const at::Tensor there = at::empty({values.numel()}, narrow);
      const at::Tensor back = at::empty_like(values);
      const auto count = static_cast<std::size_t>(values.numel());
      convert({.from = at::kFloat,
               .to = narrow,
               .input = values.const_data_ptr(),
               .output = there.mutable_data_ptr(),
               .count = count});
      convert({.from = narrow,
               .to = at::kFloat,
               .input = there.const_data_ptr(),
               .output = back.mutable_data_ptr(),
               .count = count});
      EXPECT_TRUE(there.to(at::kFloat).allclose(values.to(narrow).to(at::kFloat), 0, 0, /*equal_nan=*/true))
          << c10::toString(narrow);
      EXPECT_TRUE(back.allclose(there.to(at::kFloat), 0, 0, /*equal_nan=*/true)) << c10::toString(narrow);
    }
  const at::Tensor copied = at::empty_like(values);
  comm::shm::convert({.from = at::kFloat,
                      .to = at::kFloat,
                      .input = values.const_data_ptr(),
                      .output = copied.mutable_data_ptr(),
                      .count = 1037});
  EXPECT_TRUE(copied.allclose(values, 0, 0, /*equal_nan=*/true));
}

TEST(ReduceDeathTest, DtypeWithoutKernelAborts) {
  const at::Tensor values = at::empty({4}, at::kFloat8_e5m2);
  for (const auto& [name, kernel] : all_kernels())
    EXPECT_DEATH(run(kernel, ReduceOp::kSum, {values}), "no reduction or conversion of Float8_e5m2") << name;
  EXPECT_DEATH(convert({.from = at::kFloat,
                        .to = at::kLong,
                        .input = values.const_data_ptr(),
                        .output = values.mutable_data_ptr(),
                        .count = 1}),
               "no reduction or conversion of Long");
}

}  // namespace
}  // namespace lockstep::comm::shm
