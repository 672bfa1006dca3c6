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
  EXPECT_TRUE(is_victim("RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:2093"));
  EXPECT_TRUE(is_victim("HorovodInternalError: Horovod has been shut down. This was caused by an exception on one"));
  EXPECT_FALSE(is_victim("ValueError: bad value"));
  EXPECT_FALSE(is_victim(""));
}

TEST(ErrorTexts, PortOfTheLostPeer) {
  EXPECT_EQ(lost_port("RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:2093"), 2093);
  EXPECT_EQ(lost_port("RuntimeError: [pair.cc:547] Read error [::1]:65535: Connection reset\n"), 65535);
  EXPECT_EQ(lost_port("Connection closed by peer [127.0.0.1]:7"), 7);
  for (const char* text : {"", "RuntimeError: Broken pipe", "[a]:", "[a]:x", "[a]:0", "[a]:65536"})
    EXPECT_EQ(lost_port(text), 0) << text;
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
