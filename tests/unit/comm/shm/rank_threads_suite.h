// A test suite that runs with 2 to 7 ranks as threads, over one mapping of the memory and over one per rank.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "tests/support/rank_threads.h"

namespace lockstep::comm::shm {

using tests::Mapping;
using tests::RankThread;
using tests::RankThreads;

class RankThreadsSuite : public ::testing::TestWithParam<std::tuple<int, Mapping>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  Mapping mapping() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(RankThread&)>& body) const { RankThreads(size(), mapping()).run(body); }
};

// ThreadSanitizer does not relate accesses through two mappings, so it would take every pair of them for a race.
#if defined(__SANITIZE_THREAD__)
inline const auto kMappings = ::testing::Values(Mapping::kShared);
#else
inline const auto kMappings = ::testing::Values(Mapping::kShared, Mapping::kDistinct);
#endif
inline const auto kAllSizesAndMappings = ::testing::Combine(::testing::Range(2, 8), kMappings);

inline std::string name_of(const ::testing::TestParamInfo<std::tuple<int, Mapping>>& info) {
  return std::to_string(std::get<0>(info.param)) +
         (std::get<1>(info.param) == Mapping::kShared ? "RanksOneMapping" : "RanksDistinctMappings");
}

// Tensors are written and read here and not by libtorch, whose accesses the sanitizer does not see.
inline void fill(const at::Tensor& tensor, float value) {
  auto* data = tensor.mutable_data_ptr<float>();
  for (std::int64_t k = 0; k < tensor.numel(); ++k) data[k] = value;
}
inline void expect_all(const float* data, std::int64_t count, float expected) {
  for (std::int64_t k = 0; k < count; ++k) ASSERT_EQ(data[k], expected) << "element " << k;
}
inline void expect_all(const at::Tensor& tensor, float expected) {
  expect_all(tensor.const_data_ptr<float>(), tensor.numel(), expected);
}

/// How often the cases repeat their rounds; TSan makes each round 10 times as long.
#if defined(__SANITIZE_THREAD__)
inline constexpr std::uint32_t kRounds = 60;
#else
inline constexpr std::uint32_t kRounds = 200;
#endif

}  // namespace lockstep::comm::shm
