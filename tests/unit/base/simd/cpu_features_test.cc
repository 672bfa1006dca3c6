#include "lockstep/base/simd/cpu_features.h"

#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::base::simd {
namespace {

const std::vector<InstructionSet> kUpToAvx2{InstructionSet::kBaseline, InstructionSet::kAvx2};

TEST(CpuFeatures, WidestSupportedSetIsChosen) {
  EXPECT_EQ(choose_instruction_set(std::nullopt, kUpToAvx2), InstructionSet::kAvx2);
  EXPECT_EQ(choose_instruction_set(std::nullopt, {InstructionSet::kBaseline}), InstructionSet::kBaseline);
  EXPECT_EQ(supported_instruction_sets().front(), InstructionSet::kBaseline);
}

TEST(CpuFeatures, VariableNamesASupportedSet) {
  EXPECT_EQ(choose_instruction_set("baseline", kUpToAvx2), InstructionSet::kBaseline);
  EXPECT_EQ(choose_instruction_set("avx2", kUpToAvx2), InstructionSet::kAvx2);
}

TEST(CpuFeatures, UnsupportedOrUnknownSetIsAnError) {
  for (const std::string requested : {"avx512", "AVX2", "sse2"})
    EXPECT_EQ(tests::message_of<UsageError>([&] { choose_instruction_set(requested, kUpToAvx2); }),
              "LOCKSTEP_INSTRUCTION_SET is \"" + requested +
                  "\"; expected an instruction set that this CPU supports: baseline, avx2");
}

TEST(CpuFeatures, TableOfTheSetIsSelected) {
  const int baseline = 0, avx2 = 1, avx512 = 2;
  EXPECT_EQ(&select(InstructionSet::kBaseline, baseline, avx2, avx512), &baseline);
  EXPECT_EQ(&select(InstructionSet::kAvx2, baseline, avx2, avx512), &avx2);
  EXPECT_EQ(&select(InstructionSet::kAvx512, baseline, avx2, avx512), &avx512);
}

}  // namespace
}  // namespace lockstep::base::simd
