#include "lockstep/job/python_exception.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace lockstep::job {
namespace {

using ::testing::IsEmpty;

std::string text_of(const std::string& lines, const std::string& prefix = "") {
  return find_python_exception(lines, prefix).text();
}

TEST(PythonException, IsTheLastOne) {
  const std::string tail =
      "[1] some log\n"
      "[1] Traceback (most recent call last):\n"
      "[1]   File \"a.py\", line 1, in <module>\n"
      "[1]     f()\n"
      "[1] KeyError: 'logged, and then the program went on'\n"
      "[1] \n"
      "[1] Traceback (most recent call last):\n"
      "[1]   File \"a.py\", line 9, in <module>\n"
      "[1]     ^^^\n"
      "[1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
      "[1] More of the message\n"
      "[1] [W1127 08:00:00.0 ProcessGroupNCCL.cpp:1476] Warning: destroy_process_group() was not called\n";
  EXPECT_EQ(text_of(tail, "[1] "), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.");
}

TEST(PythonException, FirstOfAChainIsKept) {
  const std::string first = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nValueError: no label\n";
  const std::string last = "Traceback (most recent call last):\n  File \"a.py\", line 9, in g\nRuntimeError: closed\n";
  for (const char* between : {"\nDuring handling of the above exception, another exception occurred:\n\n",
                              "\nThe above exception was the direct cause of the following exception:\n\n"}) {
    const PythonException found = find_python_exception(first + between + last);
    EXPECT_EQ(found.first, "ValueError: no label");
    EXPECT_EQ(found.last, "RuntimeError: closed");
    EXPECT_EQ(found.text(), "ValueError: no label; then RuntimeError: closed");
    EXPECT_EQ(first_of(found.text()), found.first);
    EXPECT_EQ(text_of(first + between + last + between + last), found.text());
    // The beginning of the chain is missing from the last lines.
    EXPECT_EQ(text_of(between + last), "RuntimeError: closed");
    EXPECT_EQ(text_of(last + between + last), "RuntimeError: closed");
    // A chain that was logged before.
    EXPECT_EQ(text_of(first + between + last + first), "ValueError: no label");
  }
  EXPECT_EQ(text_of(first + last), "RuntimeError: closed");
  EXPECT_EQ(
      text_of("Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nModuleNotFoundError: No module named "
              "'apex'\n\nDuring handling of the above exception, another exception occurred:\n\n" +
              last),
      "RuntimeError: closed");
  EXPECT_EQ(first_of("ValueError: x"), "ValueError: x");
}

TEST(PythonException, OfAWorkerFollowsInParentheses) {
  const std::string worker =
      "Traceback (most recent call last):\n"
      "  File \"train.py\", line 9, in <module>\n"
      "RuntimeError: Caught ValueError in DataLoader worker process 0.\n"
      "Original Traceback (most recent call last):\n"
      "  File \"torch/utils/data/_utils/worker.py\", line 349, in _worker_loop\n"
      "    data = fetcher.fetch(index)\n"
      "           ^^^^^^^^^^^^^^^^^^^^\n"
      "  File \"data.py\", line 7, in __getitem__\n"
      "ValueError: sample 7 has no label\n\n";
  EXPECT_EQ(text_of(worker),
            "RuntimeError: Caught ValueError in DataLoader worker process 0. (ValueError: sample 7 has no label)");
  const std::string pool =
      "multiprocessing.pool.RemoteTraceback: \n\"\"\"\n"
      "Traceback (most recent call last):\n  File \"pool.py\", line 1, in worker\nValueError: bad\n\"\"\"\n\n"
      "The above exception was the direct cause of the following exception:\n\n"
      "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nValueError: bad\n";
  EXPECT_EQ(text_of(pool), "ValueError: bad");
  const std::string spawn =
      "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\n"
      "torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
      "-- Process 1 terminated with the following error:\n"
      "Traceback (most recent call last):\n  File \"spawn.py\", line 9, in _wrap\nValueError: bad\n";
  EXPECT_EQ(text_of(spawn), "ValueError: bad");
}

TEST(PythonException, CauseOfNcclIsAdded) {
  const std::string tail =
      "Traceback (most recent call last):\n"
      "  File \"a.py\", line 9, in <module>\n"
      "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error\n"
      "ncclUnhandledCudaError: Call to CUDA function failed.\n"
      "Last error:\n"
      "Cuda failure 2 'out of memory'\n";
  EXPECT_EQ(text_of(tail),
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error (Cuda "
            "failure 2 'out of memory')");
}

// torch.distributed adds its prefix once for each init_process_group().
TEST(PythonException, PrefixesOfTorchAndALongTraceback) {
  for (const std::string prefix : {"[0] [rank0]: ", "[0] [rank0]: [rank0]: [rank12]: "}) {
    std::string tail;
    for (const char* line :
         {"    ^^^^^^^^", "  File \"a.py\", line 9, in <module>", "    step()",
          "RuntimeError: Expected to have finished reduction in the prior iteration. ",
          "making sure all outputs participate in calculating loss.", " In addition, you can set the environment"})
      tail += prefix + line + "\n";
    EXPECT_EQ(text_of(tail, "[0] "), "RuntimeError: Expected to have finished reduction in the prior iteration.");
  }
}

TEST(PythonException, ErrorsOfArgparseHaveNoTraceback) {
  EXPECT_EQ(text_of("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --local_rank=1\n"),
            "train.py: error: unrecognized arguments: --local_rank=1");
  EXPECT_EQ(text_of("Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyboardInterrupt\n"),
            "KeyboardInterrupt");
  EXPECT_THAT(text_of("all is well\nerror: none\n"), IsEmpty());
  EXPECT_THAT(text_of("Traceback (most recent call last):\n  File \"a.py\", line 1\n"), IsEmpty());
  EXPECT_EQ(text_of("  File \"a.py\", line 1, in f\nValueError: " + std::string(5000, 'x')).size(), 403u);
}

}  // namespace
}  // namespace lockstep::job
