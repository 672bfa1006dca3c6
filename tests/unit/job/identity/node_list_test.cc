#include "lockstep/job/identity/node_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::job::identity {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::message_of;

std::vector<std::string> hosts(std::string_view list) { return expand_hosts("LIST", list); }
std::vector<int> counts(std::string_view text) { return expand_counts("COUNTS", text); }

void expect_bad_hosts(std::string_view list, const std::string& part) {
  EXPECT_THAT(message_of<base::UsageError>([&] { hosts(list); }), HasSubstr(part));
}
void expect_bad_counts(std::string_view text, const std::string& part) {
  EXPECT_THAT(message_of<base::UsageError>([&] { counts(text); }), HasSubstr(part));
}

TEST(NodeList, ExpandsHosts) {
  EXPECT_THAT(hosts("alpha"), ElementsAre("alpha"));
  EXPECT_THAT(hosts("h[1-3,07-09],x5"), ElementsAre("h1", "h2", "h3", "h07", "h08", "h09", "x5"));
  EXPECT_THAT(hosts("rack[0-1]n[2-3]"), ElementsAre("rack0n2", "rack0n3", "rack1n2", "rack1n3"));
  EXPECT_THAT(hosts("a[098-101]"), ElementsAre("a098", "a099", "a100", "a101"));
  EXPECT_THAT(hosts("a[9-011]"), ElementsAre("a9", "a10", "a11"));
  EXPECT_THAT(hosts("b,a"), ElementsAre("b", "a"));
  EXPECT_THAT(hosts("n-1.some_where[1-2]-ib"), ElementsAre("n-1.some_where1-ib", "n-1.some_where2-ib"));
  EXPECT_EQ(hosts("h[0001-4096]").back(), "h4096");
  EXPECT_EQ(hosts("h[0-63][0-63]").size(), kMaxNodes);
}

TEST(NodeList, RejectsInvalidHostLists) {
  expect_bad_hosts("", "LIST is \"\": a name is missing at column 1; expected host names and ranges");
  expect_bad_hosts("a,,b", "a name is missing at column 3");
  expect_bad_hosts("a,", "a name is missing at column 3");
  expect_bad_hosts("a[1-3", "']' is missing at column 6");
  expect_bad_hosts("a[1-]", "a number is missing at column 5");
  expect_bad_hosts("a[]", "a number is missing at column 3");
  expect_bad_hosts("a[3-1]", "a range is descending at column 3");
  expect_bad_hosts("a[0-4/2]", "']' is missing at column 6");
  expect_bad_hosts("a]", "a name is missing at column 2");
  expect_bad_hosts("a[[1]]", "a number is missing at column 3");
  expect_bad_hosts("a b", "a name is missing at column 2");
  expect_bad_hosts("-oProxyCommand=x", "a name starts with '-' at column 1");
  expect_bad_hosts("a,-b", "a name starts with '-' at column 3");
  expect_bad_hosts("$(reboot)", "a name is missing at column 1");
  expect_bad_hosts("h\xc3\xa9", "a name is missing at column 2");
  expect_bad_hosts(std::string_view("a\0b", 3), "a name is missing at column 2");
}

TEST(NodeList, RejectsHugeListsBeforeExpanding) {
  expect_bad_hosts("h[0-4096]", "there are more than 4096 entries");
  expect_bad_hosts("h[0-999999999999999999]", "there are more than 4096 entries");
  expect_bad_hosts("h[0-63][0-64]", "there are more than 4096 entries");
  expect_bad_hosts("h[1-9][1-9][1-9][1-9][1-9][1-9][1-9][1-9][1-9][1-9][1-9][1-9][1-9][1-9]",
                   "there are more than 4096 entries");
  expect_bad_hosts("h[1-4096],x", "there are more than 4096 entries");
  expect_bad_hosts("h[9999999999999999999]", "a number is too long");
  expect_bad_hosts(std::string(256, 'a'), "a name is too long");
  expect_bad_hosts(std::string(255, 'a') + "[1,111,1]", "a name is too long");
  expect_bad_hosts("h[1-4096]" + std::string(100000, 'a'), "a name is too long");
  std::string brackets = "h[1-4096]";
  for (int i = 0; i < 10000; ++i) brackets += "[1]";
  expect_bad_hosts(brackets, "a name is too long");
}

TEST(NodeList, ExpandsCounts) {
  EXPECT_THAT(counts("2(x2),1"), ElementsAre(2, 2, 1));
  EXPECT_THAT(counts("2,1"), ElementsAre(2, 1));
  EXPECT_THAT(counts("16"), ElementsAre(16));
  EXPECT_EQ(counts("4(x4096)").size(), kMaxNodes);
  expect_bad_counts("", "COUNTS is \"\": a number is missing at column 1; expected counts, such as 2(x2),1");
  expect_bad_counts("2(x2", "')' is missing at column 5");
  expect_bad_counts("2(2)", "'x' is missing at column 3");
  expect_bad_counts("2x2", "invalid count at column 2");
  expect_bad_counts("2,", "a number is missing at column 3");
  expect_bad_counts("-1", "a number is missing at column 1");
  expect_bad_counts("2(x0)", "a number is outside 1 to 4096 at column 4");
  expect_bad_counts("1048577", "a number is outside 0 to 1048576 at column 1");
  expect_bad_counts("4(x4097)", "a number is outside 1 to 4096 at column 4");
  expect_bad_counts("4(x4096),1", "there are more than 4096 entries");
  expect_bad_counts("99999999999999999999", "a number is too long");
}

TEST(NodeList, MatchesScontrol) {
  const tests::TempDir folder;
  const std::string conf = folder.write("slurm.conf", "ClusterName=t\nSlurmctldHost=localhost\n");
  for (const std::string list : {"alpha", "h[1-3,07-09],x5", "rack[0-1]n[2-3]", "a[009-11]", "a[9-011]",
                                 "a[98-101],a[098-101]", "n[1-2][3-4],n[1-3]", "n[01-2]", "a[7]"}) {
    const std::string command = "SLURM_CONF='" + conf + "' scontrol show hostnames '" + list + "' 2>/dev/null";
    std::FILE* const pipe = ::popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string printed;
    char buffer[4096];
    while (const std::size_t size = std::fread(buffer, 1, sizeof buffer, pipe)) printed.append(buffer, size);
    if (::pclose(pipe) != 0) GTEST_SKIP() << "scontrol is not installed (Debian: slurm-client)";
    std::string ours;
    for (const std::string& host : hosts(list)) ours += host + "\n";
    EXPECT_EQ(ours, printed) << list;
  }
}

}  // namespace
}  // namespace lockstep::job::identity
