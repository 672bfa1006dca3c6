#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <set>

#include "lockstep/launch/plan/host_info.h"

namespace lockstep::launcher::plan {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Returns the CPUs of a machine with `nodes` x `cores` x 2 hyperthreads. As Linux numbers them, the first threads of
/// all cores precede the second threads.
std::vector<Cpu> machine(int nodes, int cores) {
  std::vector<Cpu> cpus;
  for (int thread = 0; thread < 2; ++thread)
    for (int node = 0; node < nodes; ++node)
      for (int core = 0; core < cores; ++core)
        cpus.push_back({(thread * nodes + node) * cores + core, node * cores + core, node});
  return cpus;
}

TEST(CpuPlacement, WholeCoresNodeByNode) {
  EXPECT_THAT(split_cpus(machine(2, 2), 2), ElementsAre(ElementsAre(0, 4, 1, 5), ElementsAre(2, 6, 3, 7)));
  EXPECT_THAT(split_cpus(machine(2, 2), 4),
              ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5), ElementsAre(2, 6), ElementsAre(3, 7)));
}

TEST(CpuPlacement, EveryCpuOnceAndSizesDifferByOneCore) {
  for (int cores = 1; cores <= 9; ++cores) {
    for (int ranks = 1; ranks <= cores; ++ranks) {
      std::multiset<int> seen;
      std::size_t least = 1000, most = 0;
      for (const auto& part : split_cpus(machine(1, cores), ranks)) {
        seen.insert(part.begin(), part.end());
        least = std::min(least, part.size());
        most = std::max(most, part.size());
      }
      EXPECT_EQ(seen.size(), static_cast<std::size_t>(2 * cores));
      EXPECT_EQ(std::set<int>(seen.begin(), seen.end()).size(), seen.size());
      EXPECT_LE(most - least, 2u) << cores << " cores, " << ranks << " ranks";
    }
  }
}

TEST(CpuPlacement, MoreRanksThanCoresShareAllCpus) {
  for (const auto& part : split_cpus(machine(1, 2), 3)) EXPECT_EQ(part.size(), 4u);
}

TEST(CpuPlacement, CoresAreCountedOnce) { EXPECT_EQ(num_cores(machine(2, 3)), 6); }

TEST(CpuPlacement, UsableCpusAreThoseOfTheMask) {
  cpu_set_t before, one;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  const std::vector<Cpu> cpus = usable_cpus();
  ::sched_setaffinity(0, sizeof before, &before);
  ASSERT_EQ(cpus.size(), 1u);
  EXPECT_EQ(cpus[0].id, first);
  EXPECT_EQ(usable_cpus().size(), static_cast<std::size_t>(CPU_COUNT(&before)));
}

TEST(CpuPlacement, ParsesCpuLists) {
  EXPECT_THAT(parse_cpu_list("0-3,8"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(parse_cpu_list("5"), ElementsAre(5));
  EXPECT_THAT(parse_cpu_list(""), IsEmpty());
  EXPECT_THAT(parse_cpu_list("a-b,2,0-99999999,-1"), ElementsAre(2));
}

}  // namespace
}  // namespace lockstep::launcher::plan
