#include "lockstep/launch/cli/interface_filter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::cli {
namespace {

using ::testing::HasSubstr;

InterfaceFilter filter(std::string_view text) { return parse_interface_filter("--interface", text); }

TEST(InterfaceFilter, EmptyFilterAllowsAll) { EXPECT_TRUE(allows({}, "docker0", "172.17.0.1")); }

TEST(InterfaceFilter, NamesMatchWhole) {
  EXPECT_TRUE(allows(filter("eth0"), "eth0", "10.0.0.1"));
  EXPECT_FALSE(allows(filter("eth0"), "eth01", "10.0.0.1"));
  EXPECT_TRUE(allows(filter("eth0,ib0"), "ib0", "10.0.0.1"));
}

TEST(InterfaceFilter, NetworksMatchByAddress) {
  EXPECT_TRUE(allows(filter("10.77.0.0/16"), "a", "10.77.3.4"));
  EXPECT_FALSE(allows(filter("10.77.0.0/16"), "a", "10.78.3.4"));
  EXPECT_TRUE(allows(filter("10.77.0.128/25"), "a", "10.77.0.129"));
  EXPECT_FALSE(allows(filter("10.77.0.128/25"), "a", "10.77.0.127"));
  EXPECT_TRUE(allows(filter("0.0.0.0/0"), "a", "1.2.3.4"));
  EXPECT_FALSE(allows(filter("0.0.0.0/0"), "a", "fe80::1"));
  EXPECT_TRUE(allows(filter("fd00::/8"), "a", "fd12::5"));
  EXPECT_TRUE(allows(filter("fe80::/10"), "a", "fe80::5%eth0"));
}

TEST(InterfaceFilter, ExclusionAllowsTheRest) {
  EXPECT_FALSE(allows(filter("^docker0,172.18.0.0/16"), "docker0", "172.17.0.1"));
  EXPECT_FALSE(allows(filter("^docker0,172.18.0.0/16"), "br-5", "172.18.0.1"));
  EXPECT_TRUE(allows(filter("^docker0,172.18.0.0/16"), "eth0", "10.0.0.1"));
}

TEST(InterfaceFilter, InvalidFiltersAreRejected) {
  for (const char* text : {"", "^", "eth0,", "-o", "a b", "eth0;reboot", "10.0.0.0/33", "fd00::/129", "10.0.0/8",
                           "10.0.0.0/", "10.0.0.0/-1", "averyverylongname", "^^a"})
    EXPECT_THAT(tests::message_of<base::UsageError>([&] { filter(text); }), HasSubstr("--interface is \"")) << text;
}

TEST(InterfaceFilter, SocketIfnameVariablesMustMatchAnInterface) {
  const std::vector<std::string> has = {"lo", "eth0", "ib0"};
  const auto good = [&](const char* variable, const char* value) {
    return socket_ifname_error(variable, value, has).empty();
  };
  EXPECT_TRUE(good("GLOO_SOCKET_IFNAME", "eth0"));
  EXPECT_TRUE(good("GLOO_SOCKET_IFNAME", "eth0,ib0"));
  EXPECT_FALSE(good("GLOO_SOCKET_IFNAME", "eth"));
  EXPECT_FALSE(good("GLOO_SOCKET_IFNAME", "eth0,ib1"));
  EXPECT_TRUE(good("NCCL_SOCKET_IFNAME", "eth"));
  EXPECT_TRUE(good("NCCL_SOCKET_IFNAME", "ens,ib"));
  EXPECT_FALSE(good("NCCL_SOCKET_IFNAME", "=eth"));
  EXPECT_TRUE(good("NCCL_SOCKET_IFNAME", "=eth0"));
  EXPECT_TRUE(good("NCCL_SOCKET_IFNAME", "^docker,lo"));
  EXPECT_FALSE(good("NCCL_SOCKET_IFNAME", "^lo,eth,ib"));
  EXPECT_EQ(socket_ifname_error("GLOO_SOCKET_IFNAME", "eth7", has),
            "GLOO_SOCKET_IFNAME is \"eth7\", but this host has lo, eth0, ib0");
}

}  // namespace
}  // namespace lockstep::launcher::cli
