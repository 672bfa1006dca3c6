#include "lockstep/base/host_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>

namespace lockstep::base {
namespace {

constexpr std::uint64_t kMib = 1 << 20;

/// The files of /proc and /sys, and what they say about memory.
struct FakeHost {
  std::map<std::string, std::string> files;
  HostMemory memory() const {
    return HostMemory::from([this](const std::string& path) -> std::optional<std::string> {
      const auto found = files.find(path);
      return found == files.end() ? std::nullopt : std::optional(found->second);
    });
  }
};

FakeHost host_with_64_mib() {
  return {{{"/proc/meminfo", "MemTotal: 65536 kB\nMemFree: 1 kB\nMemAvailable:   20480 kB\n"}}};
}

TEST(HostMemory, SmallestControlGroupLimitApplies) {
  FakeHost host = host_with_64_mib();
  EXPECT_EQ(host.memory().available_bytes, 20 * kMib);
  EXPECT_EQ(host.memory().limited_by(), "the host");
  EXPECT_EQ(host.memory().describe(), "the host has 20 MiB of 64 MiB left (/proc/meminfo, MemTotal)");
  host.files["/proc/self/cgroup"] = "0::/a/b\n";
  host.files["/sys/fs/cgroup/a/b/memory.max"] = "max\n";
  host.files["/sys/fs/cgroup/a/b/memory.current"] = "7\n";
  host.files["/sys/fs/cgroup/a/memory.max"] = "1000000\n";
  host.files["/sys/fs/cgroup/a/memory.current"] = "400000\n";
  EXPECT_EQ(host.memory().available_bytes, 600000u);
  EXPECT_EQ(host.memory().limited_by(), "the control group /sys/fs/cgroup/a");
  EXPECT_EQ(host.memory().limit_bytes, 1000000u);
  EXPECT_EQ(host.memory().limit_source, "memory.max");
  host.files["/sys/fs/cgroup/a/memory.current"] = "2000000";
  EXPECT_EQ(host.memory().available_bytes, 0u);
  host.files.clear();
  EXPECT_GT(host.memory().available_bytes, std::uint64_t{1} << 60);
  EXPECT_EQ(host.memory().describe(), "the limit is unknown");
}

TEST(HostMemory, LimitOfAContainerIsAtTheRoot) {
  FakeHost host = host_with_64_mib();
  host.files["/proc/self/cgroup"] = "0::/\n";
  host.files["/sys/fs/cgroup/memory.max"] = "8388608\n";
  host.files["/sys/fs/cgroup/memory.current"] = "1048576\n";
  EXPECT_EQ(host.memory().available_bytes, 7 * kMib);
  EXPECT_EQ(host.memory().describe(), "the control group /sys/fs/cgroup has 7 MiB of 8 MiB left (memory.max)");
}

TEST(HostMemory, ControlGroupsOfVersion1) {
  FakeHost host = host_with_64_mib();
  host.files["/proc/self/cgroup"] = "9:name=systemd:/x\n4:cpu,memory:/job\n0::/\n";
  host.files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n";
  host.files["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = "5\n";
  EXPECT_EQ(host.memory().available_bytes, 20 * kMib);
  host.files["/sys/fs/cgroup/memory/job/memory.limit_in_bytes"] = "8388608\n";
  host.files["/sys/fs/cgroup/memory/job/memory.usage_in_bytes"] = "6291456\n";
  EXPECT_EQ(host.memory().available_bytes, 2 * kMib);
  EXPECT_EQ(host.memory().limit_source, "memory.limit_in_bytes");
  host.files["/sys/fs/cgroup/memory/job/memory.stat"] =
      "cache 9\ninactive_file 77\ntotal_inactive_file 1048576\ntotal_active_file 2097152\n";
  EXPECT_EQ(host.memory().available_bytes, 5 * kMib) << "the kernel drops cached file contents";
}

TEST(HostMemory, CachedFileContentsCountAsAvailable) {
  FakeHost host = host_with_64_mib();
  host.files["/proc/self/cgroup"] = "0::/a\n";
  host.files["/sys/fs/cgroup/a/memory.max"] = "8388608\n";
  host.files["/sys/fs/cgroup/a/memory.current"] = "8388608\n";
  EXPECT_EQ(host.memory().available_bytes, 0u);
  host.files["/sys/fs/cgroup/a/memory.stat"] = "anon 1\nfile 5\nshmem 7\ninactive_file 1048576\nactive_file 1048576\n";
  EXPECT_EQ(host.memory().available_bytes, 2 * kMib);
  host.files["/sys/fs/cgroup/a/memory.stat"] += "slab_reclaimable 1048576\nslab_unreclaimable 1048576\n";
  EXPECT_EQ(host.memory().available_bytes, 3 * kMib) << "also what it caches of directories and inodes";
}

TEST(HostMemory, CommitLimitAppliesWithoutOvercommit) {
  FakeHost host = host_with_64_mib();
  host.files["/proc/meminfo"] += "CommitLimit:  32768 kB\nCommitted_AS:   30720 kB\n";
  host.files["/proc/sys/vm/overcommit_memory"] = "0\n";
  EXPECT_EQ(host.memory().available_bytes, 20 * kMib);
  host.files["/proc/sys/vm/overcommit_memory"] = "2\n";
  EXPECT_EQ(host.memory().describe(),
            "the host has 2 MiB of 32 MiB left (/proc/meminfo, CommitLimit; vm.overcommit_memory is 2)");
}

double quota_of(const std::map<std::string, std::string>& files) {
  return cpu_quota([&](const std::string& path) -> std::optional<std::string> {
    const auto found = files.find(path);
    return found == files.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(CpuQuota, LeastOfTheControlGroupAndItsAncestors) {
  EXPECT_EQ(quota_of({}), std::numeric_limits<double>::infinity());
  EXPECT_EQ(quota_of({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "max 100000\n"}}),
            std::numeric_limits<double>::infinity());
  EXPECT_EQ(quota_of({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "150000 100000\n"}}), 1.5);
  EXPECT_EQ(quota_of({{"/proc/self/cgroup", "0::/pods/a\n"},
                      {"/sys/fs/cgroup/pods/a/cpu.max", "max 100000\n"},
                      {"/sys/fs/cgroup/pods/cpu.max", "400000 100000\n"},
                      {"/sys/fs/cgroup/cpu.max", "800000 100000\n"}}),
            4);
}

TEST(CpuQuota, Version1) {
  const std::string groups = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/y\n";
  EXPECT_EQ(quota_of({{"/proc/self/cgroup", groups},
                      {"/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "50000\n"},
                      {"/sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n"}}),
            0.5);
  EXPECT_EQ(quota_of({{"/proc/self/cgroup", groups},
                      {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n"},
                      {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}}),
            2)
      << "in a container, the files are at the root";
  EXPECT_EQ(quota_of({{"/proc/self/cgroup", groups},
                      {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"},
                      {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}}),
            std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace lockstep::base
