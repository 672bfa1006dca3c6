#include "lockstep/launch/cli/host_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using tests::message_of;

std::string error_of(const std::string& text) {
  return message_of<base::UsageError>([&] { parse_host_list(text); });
}

std::string file_error_of(const std::string& text) {
  return message_of<base::FormatError>([&] { parse_host_file("hosts", text); });
}

TEST(HostList, ParsesNamesAddressesUsersAndSlots) {
  EXPECT_THAT(parse_host_list("alpha:4,beta"),
              ElementsAre(HostSpec{.name = "alpha", .slots = 4}, HostSpec{.name = "beta"}));
  EXPECT_THAT(
      parse_host_list("me@10.0.0.1:2,[fe80::1%eth0]:8,fe80::2,x@[::1]"),
      ElementsAre(HostSpec{.name = "10.0.0.1", .user = "me", .slots = 2}, HostSpec{.name = "fe80::1%eth0", .slots = 8},
                  HostSpec{.name = "fe80::2"}, HostSpec{.name = "::1", .user = "x"}));
}

TEST(HostList, RepeatedHostsAddSlots) {
  EXPECT_THAT(parse_host_list("a:1,b:2,a:3"),
              ElementsAre(HostSpec{.name = "a", .slots = 4}, HostSpec{.name = "b", .slots = 2}));
  EXPECT_THAT(error_of("a,b,a:3"), AllOf(StartsWith("-H:1:5: "), HasSubstr("has slots in some entries only")));
  EXPECT_THAT(error_of("a:1,b,me@a:3"), AllOf(StartsWith("-H:1:7: "), HasSubstr("another user")));
  EXPECT_THAT(error_of("a:4000,a:97"), AllOf(StartsWith("-H:1:8: "), HasSubstr("4097 slots")));
}

TEST(HostList, EveryErrorNamesItsPosition) {
  for (const auto& [text, place] : std::vector<std::pair<std::string, std::string>>{
           {"", "-H:1:1: a host without a name"},
           {"a,,b", "-H:1:3: a host without a name"},
           {"a,", "-H:1:3: a host without a name"},
           {":4", "-H:1:1: a host without a name"},
           {"a:0", "-H:1:3: the number of slots is \"0\"; expected an integer from 1 to 4096"},
           {"a:4097", "-H:1:3: the number of slots"},
           {"a:", "-H:1:3: the number of slots is \"\""},
           {"a:4x", "-H:1:3: the number of slots is \"4x\""},
           {"a:1 b:1", "-H:1:4: a space between hosts; expected a comma"},
           {"[::1", "-H:1:1: '[' without ']'"},
           {"[alpha]", "-H:1:2: the address is \"alpha\"; expected an IPv6 address"},
           {"[::1]4", "-H:1:6: \"4\" after ']'"},
           {"@a", "-H:1:1: the user is \"\""},
           {"-l@a", "-H:1:1: the user is \"-l\""},
           {"-oProxyCommand=x", "-H:1:1: the host is \"-oProxyCommand=x\""},
           {"b,h;rm", "-H:1:3: the host is \"h;rm\""},
           {"$(x)", "-H:1:1: the host is"},
           {"h\xc3\xa4", "-H:1:1: the host is"},
           {std::string("a\0b", 3), "-H:1:1: the host is"},
           {std::string(254, 'a'), "-H:1:1: the host is"}})
    EXPECT_THAT(error_of(text), StartsWith(place)) << text;
}

TEST(HostFile, BothSlotSyntaxes) {
  EXPECT_THAT(parse_host_file("hosts", "# ours\nalpha slots=4\r\n\n  beta:2 # a comment\n[::1]:3\nlast"),
              ElementsAre(HostSpec{.name = "alpha", .slots = 4}, HostSpec{.name = "beta", .slots = 2},
                          HostSpec{.name = "::1", .slots = 3}, HostSpec{.name = "last"}));
}

TEST(HostFile, HostOptionsInAHostFile) {
  EXPECT_THAT(parse_host_file("hosts", "a:1 port=2222 user=me path=/opt/bin/lockstep interface=10.0.0.0/8\n"),
              ElementsAre(HostSpec{.name = "a",
                                   .user = "me",
                                   .port = 2222,
                                   .slots = 1,
                                   .remote_path = "/opt/bin/lockstep",
                                   .interface = "10.0.0.0/8"}));
}

TEST(HostFile, EveryErrorNamesItsPosition) {
  for (const auto& [text, place] : std::vector<std::pair<std::string, std::string>>{
           {"", "hosts:1:1: no host"},
           {"# none\n\n", "hosts:3:1: no host"},
           {"a\n\tb slot=4\n", "hosts:2:4: unknown option \"slot=4\"; expected slots="},
           {"a 4", "hosts:1:3: unknown option \"4\""},
           {"a slots=-1", "hosts:1:9: the number of slots is \"-1\""},
           {"a slots=", "hosts:1:9: the number of slots is \"\""},
           {"a:2 slots=2", "hosts:1:5: the number of slots is given twice"},
           {"a port=65536", "hosts:1:8: the port"},
           {"a user=-x", "hosts:1:8: the user is"},
           {"me@a user=you", "hosts:1:11: the user is \"you\" here and \"me\" before"},
           {"a path=/x;y", "hosts:1:8: the path is"},
           {"a interface=$x", "hosts:1:13: the interface is"},
           {"a\nb\na port=1\n",
            "hosts:3:1: the host \"a\" has another user, port, path or interface in an earlier entry"}})
    EXPECT_THAT(file_error_of(text), StartsWith(place)) << text;
}

TEST(HostFile, OverlongTextIsRejected) {
  EXPECT_THAT(file_error_of(std::string((1 << 20) + 1, '#')), StartsWith("hosts:1:1: longer than"));
  std::string many;
  for (int i = 0; i < 4097; ++i) many += "h" + std::to_string(i) + "\n";
  EXPECT_THAT(file_error_of(many), StartsWith("hosts:4097:1: more than 4096 hosts"));
}

TEST(HostList, SshDestination) {
  EXPECT_EQ(ssh_destination({.name = "a"}), "a");
  EXPECT_EQ(ssh_destination({.name = "fe80::1", .user = "me"}), "me@fe80::1");
}

}  // namespace
}  // namespace lockstep::launcher::cli
