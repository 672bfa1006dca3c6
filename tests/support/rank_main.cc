#include "tests/support/rank_main.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <optional>
#include <string>

#include "lockstep/base/check.h"
#include "lockstep/comm/init.h"

namespace lockstep::tests {
namespace {

std::optional<comm::Group> the_world;

/// Prints only failures: the test output of ranks other than 0.
class FailuresOnly final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& test) override {
    // current_test_info() would deadlock in OnTestPartResult(), where gtest holds its mutex.
    test_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  void OnTestPartResult(const ::testing::TestPartResult& part) override {
    if (!part.failed()) return;
    std::printf("%s failed\n%s:%d\n%s\n", test_.c_str(), part.file_name() ? part.file_name() : "-", part.line_number(),
                part.message());
    std::fflush(stdout);
  }
  std::string test_ = "-";
};

}  // namespace

const comm::Group& world() {
  LOCKSTEP_CHECK(the_world.has_value());
  return *the_world;
}

void leave_world() { the_world.reset(); }

}  // namespace lockstep::tests

int main(int argc, char** argv) {
  using namespace lockstep;
  ::testing::InitGoogleTest(&argc, argv);
  try {
    tests::the_world = comm::init();
  } catch (const base::Error& error) {
    std::fprintf(stderr, "init: %s\n", error.what());
    return base::exit_code(error.cause());
  }
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (tests::world().rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new tests::FailuresOnly);
  }
  const int code = RUN_ALL_TESTS();
  tests::leave_world();
  // A filter that matches no test, such as a misspelled name, is a failure.
  return ::testing::UnitTest::GetInstance()->test_to_run_count() == 0 ? 2 : code;
}
