#include "lockstep/launch/process/python_program.h"

#include <gtest/gtest.h>

namespace lockstep::launcher::process {
namespace {

using Words = std::vector<std::string>;

TEST(PythonProgram, FindsTheScript) {
  EXPECT_EQ(python_script_index({"python3", "train.py", "--x"}), 1U);
  EXPECT_EQ(python_script_index({"/venv/bin/python3.11", "-u", "-W", "ignore", "-Xdev", "a/train", "-m"}), 5U);
  EXPECT_EQ(python_script_index({"python", "-uX", "dev", "--check-hash-based-pycs", "never", "x"}), 5U);
  EXPECT_EQ(python_script_index({"./train.py", "--x"}), 0U);
  for (const Words& words : {Words{},
                             {"python3"},
                             {"python", "-c", "x.py"},
                             {"python", "-u", "-m", "x.py"},
                             {"python", "-"},
                             {"train.py"},
                             {"./train", "x.py"},
                             {"bash", "x.py"},
                             {"python", "-X"},
                             {"python", "-um", "x.py"},
                             {"python", "-Ic", "x.py"}})
    EXPECT_FALSE(python_script_index(words)) << (words.empty() ? "" : words.front());
}

TEST(PythonProgram, RecognisesInterpretersByName) {
  EXPECT_TRUE(is_python("python"));
  EXPECT_TRUE(is_python("/usr/bin/python3.12"));
  EXPECT_FALSE(is_python("/opt/python3/bin/train"));
}

}  // namespace
}  // namespace lockstep::launcher::process
