#include "lockstep/launch/process/event_loop.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "lockstep/base/fd.h"

namespace lockstep::launcher::process {
namespace {

using base::Deadline;
using namespace std::chrono_literals;

/// A pipe that a test makes readable.
struct Source {
  base::Pipe pipe = base::make_pipe();
  void make_readable() { EXPECT_EQ(::write(pipe.write.get(), "x", 1), 1); }
};

TEST(EventLoop, HandlersAreCalledInTheirOrder) {
  EventLoop loop;
  Source first, second, silent;
  Deadline due = Deadline::in(0ms);
  std::string calls;
  loop.at([&] { return due; },
          [&] {
            calls += "t";
            due = Deadline::never();
          });
  loop.on_readable([&] { return first.pipe.read.get(); }, [&] { calls += "1"; });
  loop.on_readable([&] { return second.pipe.read.get(); }, [&] { calls += "2"; });
  loop.on_readable([&] { return silent.pipe.read.get(); }, [&] { calls += "-"; });
  loop.on_readable([] { return -1; }, [&] { calls += "-"; });
  loop.on_writable([&] { return silent.pipe.write.get(); }, [&] { calls += "w"; });
  second.make_readable();
  first.make_readable();
  EXPECT_TRUE(loop.run_once());
  EXPECT_EQ(calls, "12wt");
}

TEST(EventLoop, DescriptorThatAnEarlierHandlerHasClosedIsNotHandled) {
  EventLoop loop;
  Source first, second;
  loop.on_readable([&] { return first.pipe.read.get(); }, [&] { second.pipe.read.reset(); });
  loop.on_readable([&] { return second.pipe.read.get(); }, [] { ADD_FAILURE() << "it is closed"; });
  first.make_readable();
  second.make_readable();
  EXPECT_TRUE(loop.run_once());
}

TEST(EventLoop, HandlerMayAddDescriptors) {
  EventLoop loop;
  Source source;
  int calls = 0;
  loop.on_readable([&] { return source.pipe.read.get(); },
                   [&loop, &calls] {  // so small that it lies in the loop's list itself, not on the heap
                     for (int i = 0; i < 1000; ++i) loop.on_readable([] { return -1; }, [] {});
                     ++calls;
                   });
  source.make_readable();
  EXPECT_TRUE(loop.run_once());
  EXPECT_EQ(calls, 1);
}

TEST(EventLoop, TimeEndsTheWait) {
  EventLoop loop;
  Source silent;
  Deadline due = Deadline::in(20ms);
  loop.on_readable([&] { return silent.pipe.read.get(); }, [] { ADD_FAILURE(); });
  loop.at([&] { return due; }, [&] { due = Deadline::never(); });
  while (!due.is_never()) EXPECT_FALSE(loop.run_once());
}

}  // namespace
}  // namespace lockstep::launcher::process
