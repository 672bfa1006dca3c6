#include "lockstep/base/telemetry/memory_users.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "lockstep/base/shared_memory.h"

namespace lockstep::base::telemetry {
namespace {

constexpr std::uint64_t kMib = 1 << 20;

TEST(MemoryUsers, LargestAreNamed) {
  EXPECT_EQ(describe_largest({{"a", 3 * kMib}, {"b", 7 * kMib}, {"c", 1}, {"d", 5 * kMib}, {"e", 2 * kMib}}),
            "b 7 MiB, d 5 MiB, a 3 MiB, e 2 MiB");
  EXPECT_EQ(describe_largest({}), "");
}

TEST(MemoryUsers, ProcessIsFoundWithItsMemory) {
  const std::vector<char> memory(40 * kMib, 1);
  const auto users = find_memory_users("");
  const std::string name = "process " + std::to_string(::getpid()) + " (";
  const auto self =
      std::find_if(users.begin(), users.end(), [&](const MemoryUser& user) { return user.name.starts_with(name); });
  ASSERT_NE(self, users.end());
  EXPECT_GE(self->bytes, memory.size());
  EXPECT_TRUE(find_memory_users("/sys/fs/cgroup/no-such-group").empty());
}

// Another user chooses the name of his process, and this rank's error shows it on a terminal.
TEST(MemoryUsers, NamesOfProcessesAreEscaped) {
  char before[16] = "";
  ::prctl(PR_GET_NAME, before);
  ::prctl(PR_SET_NAME, "\x1b[31m\xc2\x9b");
  const std::vector<char> memory(2 * kMib, 1);
  const std::string text = describe_largest(find_memory_users(""));
  const auto users = find_memory_users("");
  ::prctl(PR_SET_NAME, before);
  EXPECT_TRUE(std::any_of(users.begin(), users.end(), [](const MemoryUser& user) {
    // Another test may have made this process a rank, which the rest of the name says.
    return user.name.starts_with("process " + std::to_string(::getpid()) + " (\\x1b[31m\\xc2\\x9b");
  })) << text;
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

TEST(MemoryUsers, SharedMemoryOfTheJobIsCountedOnce) {
  const std::uint64_t before = shared_bytes_of_job();
  const SharedMemory memory = SharedMemory::create("lockstep-test", 8 * kMib);
  EXPECT_EQ(shared_bytes_of_job(), before);
  ASSERT_EQ(memory.reserve(0, 3 * kMib), 0);
  const SharedMemory again = SharedMemory::map(Fd(::dup(memory.fd().get())), 8 * kMib);
  EXPECT_EQ(shared_bytes_of_job(), before + 3 * kMib);
}

}  // namespace
}  // namespace lockstep::base::telemetry
