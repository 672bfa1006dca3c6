#include "lockstep/launch/process/python_stacks.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>

namespace lockstep::launcher::process {
namespace {

using namespace std::chrono_literals;

TEST(PythonStacks, LocationIsTheNewestCallOfTheProgramInTheMainThread) {
  const std::string stacks =
      "Python stacks of process 7 (python), newest call first:\n"
      "Thread 0x00007f01 (most recent call first):\n"
      "  File \"/home/me/watch.py\", line 3 in run\n"
      "\n"
      "Current thread 0x00007f02 (most recent call first):\n"
      "  File \"/venv/lib/python3.11/site-packages/torch/autograd/graph.py\", line 841 in _engine_run_backward\n"
      "  File \"/usr/lib/python3.11/threading.py\", line 1 in wait\n"
      "  File \"/opt/lib/lockstep/_lockstep_hook/watch.py\", line 162 in next_batch\n"
      "  File \"<frozen importlib._bootstrap>\", line 9 in load\n"
      "  File \"/home/me/a \"b\", line 5 in c.py\", line 42 in main in here\n"
      "  File \"/home/me/train.py\", line 60 in <module>\n"
      "\n"
      "Python stacks of process 8 (pt_data_worker), newest call first:\n"
      "Current thread 0x00007f03 (most recent call first):\n"
      "  File \"/home/me/worker.py\", line 1 in work\n";
  EXPECT_EQ(python_location(stacks),
            "/home/me/a \"b\", line 5 in c.py:42 in main in here; its process 8 (pt_data_worker) is at "
            "/home/me/worker.py:1 in work");
}

TEST(PythonStacks, LocationInPackagesOnly) {
  EXPECT_EQ(python_location("Python stacks of process 7 (python), newest call first:\n"
                            "Current thread 0x00007f02 (most recent call first):\n"
                            "  File \"/usr/lib/python3.11/socket.py\", line 706 in readinto\n"
                            "  File \"/usr/lib/python3/dist-packages/tool.py\", line 6 in <module>\n"),
            "/usr/lib/python3.11/socket.py:706 in readinto");
  EXPECT_EQ(python_location(""), "");
  EXPECT_EQ(python_location("  File \"x\n  File \"x\", line 1\nnonsense"), "");
}

TEST(PythonStacks, ChildThatHangsInForkIsNamed) {
  EXPECT_EQ(
      python_location("Python stacks of process 7 (python), newest call first:\n"
                      "Current thread 0x00007f02 (most recent call first):\n"
                      "  File \"/home/me/train.py\", line 60 in <module>\n"
                      "\n"
                      "Python stacks of process 8 (python), newest call first:\n"
                      "Current thread 0x00007f03 (most recent call first):\n"
                      "  File \"/usr/lib/python3.11/multiprocessing/popen_fork.py\", line 66 in _launch\n"
                      "  File \"/home/me/train.py\", line 60 in <module>\n"),
      "/home/me/train.py:60 in <module>; its process 8 (python) hangs in os.fork(), as CPython before 3.10.15 and "
      "3.11.10 may: use a newer Python, or --bind none");
}

TEST(PythonStacks, NoSignalToAProcessWithoutTheHandler) {
  EXPECT_EQ(read_python_stacks({::getpid(), ::getppid()}, base::Deadline::in(100ms)), "");  // would end them
}

}  // namespace
}  // namespace lockstep::launcher::process
