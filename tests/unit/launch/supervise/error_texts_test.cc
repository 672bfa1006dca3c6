#include "lockstep/launch/supervise/error_texts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::supervise {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(ErrorTexts, ExceptionIsTheLastOne) {
  const std::string tail =
      "[1] some log\n"
      "[1] Traceback (most recent call last):\n"
      "[1]   File \"a.py\", line 1, in <module>\n"
      "[1]     f()\n"
      "[1] KeyError: 'x'\n"
      "[1] \n"
      "[1] During handling of the above exception, another exception occurred:\n"
      "[1] \n"
      "[1] Traceback (most recent call last):\n"
      "[1]   File \"a.py\", line 9, in <module>\n"
      "[1]     ^^^\n"
      "[1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
      "[1] More of the message\n"
      "[1] [W1127 08:00:00.0 ProcessGroupNCCL.cpp:1476] Warning: destroy_process_group() was not called\n";
  EXPECT_EQ(python_exception(tail, "[1] "), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.");
}

TEST(ErrorTexts, CauseOfNcclIsAdded) {
  const std::string tail =
      "Traceback (most recent call last):\n"
      "  File \"a.py\", line 9, in <module>\n"
      "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error\n"
      "ncclUnhandledCudaError: Call to CUDA function failed.\n"
      "Last error:\n"
      "Cuda failure 2 'out of memory'\n";
  EXPECT_EQ(python_exception(tail, ""),
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error (Cuda "
            "failure 2 'out of memory')");
}

TEST(ErrorTexts, PrefixOfTorchAndALongTraceback) {
  const std::string tail =
      "[0] [rank0]:     ^^^^^^^^\n"
      "[0] [rank0]:   File \"a.py\", line 9, in <module>\n"
      "[0] [rank0]:     step()\n"
      "[0] [rank0]: RuntimeError: Expected to have finished reduction in the prior iteration. \n"
      "[0] [rank0]: making sure all outputs participate in calculating loss.\n"
      "[0] [rank0]:  In addition, you can set the environment variable\n";
  EXPECT_EQ(python_exception(tail, "[0] "),
            "RuntimeError: Expected to have finished reduction in the prior iteration.");
}

TEST(ErrorTexts, ErrorsOfArgparseHaveNoTraceback) {
  EXPECT_EQ(python_exception("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --local_rank=1\n", ""),
            "train.py: error: unrecognized arguments: --local_rank=1");
  EXPECT_EQ(python_exception("Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyboardInterrupt\n", ""),
            "KeyboardInterrupt");
  EXPECT_THAT(python_exception("all is well\nerror: none\n", ""), IsEmpty());
  EXPECT_THAT(python_exception("Traceback (most recent call last):\n  File \"a.py\", line 1\n", ""), IsEmpty());
  const std::string is_long =
      python_exception("  File \"a.py\", line 1, in f\nValueError: " + std::string(5000, 'x'), "");
  EXPECT_EQ(is_long.size(), 403u);
}

TEST(ErrorTexts, FirstRowIsUsedWithoutRegardToCase) {
  const auto* row = find_known_error("RuntimeError: The server socket has failed: EADDRINUSE, Address already in use",
                                     known_errors());
  ASSERT_NE(row, nullptr);
  EXPECT_THAT(row->remedy, HasSubstr("lockstep run finds a free port"));
  EXPECT_THAT(find_known_error("No module named 'apex'", known_errors())->remedy, HasSubstr("torch.amp"));
  EXPECT_THAT(find_known_error("No module named 'numpy'", known_errors())->remedy, HasSubstr("activate"));
  EXPECT_EQ(find_known_error("nothing of the kind", known_errors()), nullptr);
}

TEST(ErrorTexts, Victims) {
  EXPECT_TRUE(is_victim("RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:2093", ""));
  EXPECT_TRUE(
      is_victim("HorovodInternalError: Horovod has been shut down. This was caused by an exception on one", ""));
  EXPECT_FALSE(is_victim("ValueError: bad value", ""));
  EXPECT_FALSE(is_victim("", ""));
  const std::string traceback = "[1] retry: Connection reset by peer\n[1]   File \"a.py\", line 1, in f\n[1] ";
  EXPECT_FALSE(is_victim(traceback + "ValueError: bad value\n", "[1] "));
  EXPECT_TRUE(
      is_victim(traceback + "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:2093\n", "[1] "));
}

TEST(ErrorTexts, PortOfTheLostPeer) {
  const std::string traceback = "[1] x [::1]:5\n[1]   File \"a.py\", line 1, in f\n[1] ";
  EXPECT_EQ(lost_port(traceback + "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:2093\n", "[1] "),
            2093);
  EXPECT_EQ(lost_port(traceback + "RuntimeError: [pair.cc:547] Read error [::1]:65535: Connection reset\n", "[1] "),
            65535);
  EXPECT_EQ(lost_port("Connection closed by peer [127.0.0.1]:7", ""), 7);
  for (const char* text : {"", "RuntimeError: Broken pipe", "[a]:", "[a]:x", "[a]:0", "[a]:65536"})
    EXPECT_EQ(lost_port(text, ""), 0) << text;
}

// Every remedy can be reached: no earlier row hides it.
TEST(ErrorTexts, EachRowIsFoundByItsText) {
  EXPECT_GE(known_errors().size(), 25u);
  for (const KnownError& row : known_errors()) {
    const KnownError* found = find_known_error(row.text, known_errors());
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->text, row.text);
  }
}

// docs/reference/error-texts.md is this table.
TEST(ErrorTexts, PageHasTheRows) {
  std::ostringstream page, expected;
  page << std::ifstream(LOCKSTEP_SOURCE_DIR "/docs/reference/error-texts.md").rdbuf();
  for (const KnownError& row : known_errors())
    expected << "| `" << row.text << "` | " << row.remedy
             << (row.is_victim ? "; never named while the other failed" : "") << " |\n";
  EXPECT_THAT(page.str(), HasSubstr(expected.str())) << expected.str();
}

TEST(ErrorTexts, OwnRows) {
  const auto rows = parse_known_errors("# mine\n\nlicence expired\task Eve: 4711\n", "hints");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].text, "licence expired");
  EXPECT_EQ(rows[0].remedy, "ask Eve: 4711");
  for (const char* wrong : {"no tab\n", "\tx\n", "x\t\n"})
    EXPECT_THAT(tests::message_of<base::UsageError>([&] { parse_known_errors(std::string("#\n") + wrong, "hints"); }),
                HasSubstr("hints:2: "));
}

}  // namespace
}  // namespace lockstep::launcher::supervise
