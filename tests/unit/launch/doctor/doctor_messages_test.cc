#include "lockstep/launch/doctor/doctor_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "lockstep/base/error.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher::doctor {
namespace {

using ::testing::ElementsAre;

HostFacts sample_facts() {
  HostFacts facts;
  facts.program = {"/p", "e", "h", "/ld", "/py"};
  facts.libraries = {"/ld", 0, "\ta => b\nc\x1b[2J => not found", "\x1b[1m"};
  facts.nvidia_smi = {"/smi", process::ToolResult::kTimedOut, "", ""};
  facts.addresses = {{"eth0", "10.0.0.1", false}, {"lo", "::1", true}};
  facts.orted = "/usr/bin/orted";
  facts.cpus_online = 8;
  facts.memory_bytes = std::uint64_t{1} << 40;
  facts.huge_page_bytes = 5;
  facts.memlock_bytes = -1;
  facts.infiniband = true;
  facts.transparent_huge_pages = "madvise";
  facts.copy_bytes_per_s = 1.5e10;
  return facts;
}

TEST(DoctorMessages, HostFactsRoundTrip) {
  const HostFacts got = decode_host_facts(encode_host_facts(sample_facts()));
  EXPECT_EQ(got.program.path + got.program.error + got.program.hash + got.program.loader + got.program.python,
            "/peh/ld/py");
  EXPECT_EQ(got.libraries.out + "|" + got.libraries.err,
            " a => b\nc?[2J => not found|?[1m");  // line breaks stay, terminal control characters are replaced
  EXPECT_EQ(got.nvidia_smi.code, process::ToolResult::kTimedOut);
  ASSERT_EQ(got.addresses.size(), 2u);
  EXPECT_EQ(got.addresses[0].interface, "eth0");
  EXPECT_TRUE(got.addresses[1].loopback);
  EXPECT_EQ(got.orted, "/usr/bin/orted");
  EXPECT_EQ(got.cpus_online, 8);
  EXPECT_EQ(got.memory_bytes, std::uint64_t{1} << 40);
  EXPECT_EQ(got.huge_page_bytes, 5u);
  EXPECT_EQ(got.memlock_bytes, -1);
  EXPECT_TRUE(got.infiniband);
  EXPECT_EQ(got.transparent_huge_pages, "madvise");
  EXPECT_EQ(got.copy_bytes_per_s, 1.5e10);
}

TEST(DoctorMessages, RequestsRoundTrip) {
  const HostFactsRequest request =
      protocol::decoded<HostFactsRequest>(protocol::encoded(HostFactsRequest{.command = {"/p", "", "a b"},
                                                                             .directory = "/d",
                                                                             .extends_own_environment = true,
                                                                             .environment = {"A=b"},
                                                                             .mpi = true}));
  EXPECT_THAT(request.command, ElementsAre("/p", "", "a b"));
  EXPECT_THAT(request.environment, ElementsAre("A=b"));
  EXPECT_EQ(request.directory, "/d");
  EXPECT_TRUE(request.extends_own_environment && request.mpi);
  const ListenRequest listen =
      protocol::decoded<ListenRequest>(protocol::encoded(ListenRequest{1, 2, "t", "10.0.0.1"}));
  EXPECT_EQ(std::tie(listen.self, listen.caller, listen.token, listen.host), std::tuple(1, 2, "t", "10.0.0.1"));
  const ListenReply reply = protocol::decoded<ListenReply>(protocol::encoded(ListenReply{{"10.0.0.1", 41000}, "e"}));
  EXPECT_EQ(base::net::to_string(reply.address) + reply.error, "10.0.0.1:41000e");
  const MeasureRequest measure =
      protocol::decoded<MeasureRequest>(protocol::encoded(MeasureRequest{3, 4, "t", {"10.0.0.1", 7}}));
  EXPECT_EQ(std::tie(measure.self, measure.peer, measure.token, measure.address.port), std::tuple(3, 4, "t", 7));
  const LinkSpeed speed = protocol::decoded<LinkSpeed>(protocol::encoded(LinkSpeed{11, 12, 13, "x\n"}));
  EXPECT_EQ(std::tie(speed.round_trip_ns, speed.bytes, speed.ns, speed.error), std::tuple(11, 12u, 13, "x?"));
}

TEST(DoctorMessages, EveryTruncationIsRejected) {
  const std::vector<std::pair<std::string, std::function<void(std::string_view)>>> all = {
      {encode_host_facts(sample_facts()), [](std::string_view bytes) { decode_host_facts(bytes); }},
      {protocol::encoded(HostFactsRequest{.command = {"a"}, .environment = {"b"}}),
       [](std::string_view bytes) { protocol::decoded<HostFactsRequest>(bytes); }},
      {protocol::encoded(ListenRequest{1, 2, "t", "h"}),
       [](std::string_view bytes) { protocol::decoded<ListenRequest>(bytes); }},
      {protocol::encoded(ListenReply{{"h", 1}, ""}),
       [](std::string_view bytes) { protocol::decoded<ListenReply>(bytes); }},
      {protocol::encoded(MeasureRequest{1, 2, "t", {"h", 1}}),
       [](std::string_view bytes) { protocol::decoded<MeasureRequest>(bytes); }},
      {protocol::encoded(LinkSpeed{}), [](std::string_view bytes) { protocol::decoded<LinkSpeed>(bytes); }},
  };
  for (const auto& [bytes, decode] : all) {
    EXPECT_NO_THROW(decode(bytes));
    for (std::size_t size = 0; size < bytes.size(); ++size)
      EXPECT_THROW(decode(std::string_view(bytes).substr(0, size)), base::Error) << size;
    EXPECT_THROW(decode(bytes + "x"), base::Error);
  }
}

TEST(DoctorMessages, HugeCountAllocatesNothing) {
  std::string bytes = encode_host_facts(HostFacts());
  bytes.replace(bytes.size() - 4, 4, "\xff\xff\xff\xff");
  EXPECT_THROW(decode_host_facts(bytes), base::Error);
}

/// The facts contain the largest possible output of six tools.
TEST(DoctorMessages, LargestHostFactsFitInAFrame) {
  HostFacts facts;
  for (process::ToolResult* tool :
       {&facts.libraries, &facts.python, &facts.probe, &facts.nvidia_smi, &facts.resolved, &facts.mpirun})
    tool->out = tool->err = std::string(process::kMaxOutputBytes, 'x');
  EXPECT_LT(encode_host_facts(facts).size(), protocol::kMaxFrameBytes / 2);
}

}  // namespace
}  // namespace lockstep::launcher::doctor
