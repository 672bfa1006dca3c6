#include "lockstep/comm/arena/fork_copies.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>

namespace lockstep::comm::arena {
namespace {

constexpr std::size_t kPage = 4096;

/// Returns the exit code of a child that is forked now and calls read() after meanwhile() has run here.
int in_child(const std::function<int()>& read, const std::function<void()>& meanwhile) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[1]);
    char unused = 0;
    ::_exit(::read(ends[0], &unused, 1) == 0 ? read() : -1);
  }
  meanwhile();
  ::close(ends[0]);
  ::close(ends[1]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(ForkCopied, ChildHasTheUsedRangesOfTheFork) {
  const base::SharedMemory memory = base::SharedMemory::create("test", 4 * kPage);
  char* const data = memory.data();
  std::memset(data, 1, memory.size());
  const ForkCopied copied(data, memory.size(),
                          [] { return std::vector<ForkCopied::Range>{{0, kPage}, {2 * kPage, 3 * kPage}}; });
  EXPECT_EQ(
      in_child([&] { return data[0] + 2 * data[2 * kPage] + data[kPage]; }, [&] { std::memset(data, 9, kPage * 4); }),
      3);
}

TEST(ForkCopied, EachChildHasTheValuesOfItsFork) {
  const base::SharedMemory memory = base::SharedMemory::create("test", kPage);
  char* const data = memory.data();
  const ForkCopied copied(data, memory.size());
  for (const char value : {1, 2}) {
    data[0] = value;
    EXPECT_EQ(in_child([&] { return data[0] + 0; }, [&] { data[0] = 9; }), value);
  }
}

TEST(ForkCopied, PrivateViewKeepsTheValuesOfTheFork) {
  const base::SharedMemory memory = base::SharedMemory::create("test", 2 * kPage);
  std::memset(memory.data(), 1, memory.size());
  const base::PrivateView view(memory, memory.size());
  const ForkCopied copied(view.data(), view.size());
  view.data()[0] = 5;
  EXPECT_EQ(in_child([&] { return view.data()[0] + view.data()[kPage]; },
                     [&] { std::memset(memory.data(), 9, memory.size()); }),
            6);
}

TEST(ForkCopied, ChildrenOfChildrenHaveTheValuesOfTheirParent) {
  const base::SharedMemory memory = base::SharedMemory::create("test", kPage);
  char* const data = memory.data();
  data[0] = 1;
  const ForkCopied copied(data, memory.size());
  const auto of_grandchild = [&] {
    data[0] = 2;
    return in_child([&] { return data[0] + 0; }, [&] { data[0] = 3; });
  };
  EXPECT_EQ(in_child(of_grandchild, [&] { data[0] = 9; }), 2);
  EXPECT_EQ(data[0], 9);
}

TEST(SharedForkCopies, ChildrenHaveTheValuesOfTheFirstFork) {
  const base::SharedMemory memory = base::SharedMemory::create("test", kPage);
  char* const data = memory.data();
  data[0] = 1;
  const ForkCopied copied(data, memory.size());
  const auto read = [&] { return data[0] + 0; };
  {
    const SharedForkCopies scope;
    EXPECT_EQ(in_child(read, [&] { data[0] = 2; }), 1);
    EXPECT_EQ(in_child(read, [&] { data[0] = 3; }), 1);
    const base::SharedMemory more = base::SharedMemory::create("test", kPage);
    const ForkCopied more_copied(more.data(), more.size());
    EXPECT_EQ(in_child(read, [] {}), 3) << "other memory needs another copy";
  }
  data[0] = 4;
  EXPECT_EQ(in_child(read, [&] { data[0] = 5; }), 4);
}

}  // namespace
}  // namespace lockstep::comm::arena
