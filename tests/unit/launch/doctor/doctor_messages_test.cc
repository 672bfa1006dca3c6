#include "lockstep/launch/doctor/doctor_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "lockstep/base/error.h"
#include "lockstep/launch/protocol/frames.h"

namespace lockstep::launcher {
namespace {

using ::testing::ElementsAre;

Examination examination() {
  Examination found;
  found.program = {"/p", "e", "h", "/ld", "/py"};
  found.libraries = {"/ld", 0, "\ta => b\nc\x1b[2J => not found", "\x1b[1m"};
  found.smi = {"/smi", ToolSaid::kNoEnd, "", ""};
  found.addresses = {{"eth0", "10.0.0.1", false}, {"lo", "::1", true}};
  found.orted = "/usr/bin/orted";
  found.cpus_online = 8;
  found.memory_bytes = std::uint64_t{1} << 40;
  found.huge_page_bytes = 5;
  found.memlock_bytes = -1;
  found.infiniband = true;
  found.transparent_huge_pages = "madvise";
  found.copy_bytes_per_s = 1.5e10;
  return found;
}

TEST(DoctorWire, AnExaminationArrives) {
  const Examination got = decode_examined(encode_examined(examination()));
  EXPECT_EQ(got.program.path + got.program.error + got.program.hash + got.program.loader + got.program.python,
            "/peh/ld/py");
  EXPECT_EQ(got.libraries.out + "|" + got.libraries.err,
            " a => b\nc?[2J => not found|?[1m");  // lines stay, what a terminal would obey does not pass
  EXPECT_EQ(got.smi.code, ToolSaid::kNoEnd);
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

TEST(DoctorWire, OrdersArrive) {
  const ExamineOrder order = decode_examine(encode_examine(
      {.command = {"/p", "", "a b"}, .directory = "/d", .add_to_own = true, .environment = {"A=b"}, .mpi = true}));
  EXPECT_THAT(order.command, ElementsAre("/p", "", "a b"));
  EXPECT_THAT(order.environment, ElementsAre("A=b"));
  EXPECT_EQ(order.directory, "/d");
  EXPECT_TRUE(order.add_to_own && order.mpi);
  const ListenOrder listen = decode_listen(encode_listen({1, 2, "t", "10.0.0.1"}));
  EXPECT_EQ(std::tie(listen.self, listen.caller, listen.token, listen.host), std::tuple(1, 2, "t", "10.0.0.1"));
  const ListenReply reply = decode_listening(encode_listening({{"10.0.0.1", 41000}, "e"}));
  EXPECT_EQ(base::to_string(reply.address) + reply.error, "10.0.0.1:41000e");
  const MeasureOrder measure = decode_measure(encode_measure({3, 4, "t", {"10.0.0.1", 7}}));
  EXPECT_EQ(std::tie(measure.self, measure.peer, measure.token, measure.address.port), std::tuple(3, 4, "t", 7));
  const PairSpeed speed = decode_measured(encode_measured({11, 12, 13, "x\n"}));
  EXPECT_EQ(std::tie(speed.round_trip_ns, speed.bytes, speed.ns, speed.error), std::tuple(11, 12u, 13, "x?"));
}

TEST(DoctorWire, EveryTruncationIsRefused) {
  const std::vector<std::pair<std::string, std::function<void(std::string_view)>>> all = {
      {encode_examined(examination()), [](std::string_view bytes) { decode_examined(bytes); }},
      {encode_examine({.command = {"a"}, .environment = {"b"}}), [](std::string_view bytes) { decode_examine(bytes); }},
      {encode_listen({1, 2, "t", "h"}), [](std::string_view bytes) { decode_listen(bytes); }},
      {encode_listening({{"h", 1}, ""}), [](std::string_view bytes) { decode_listening(bytes); }},
      {encode_measure({1, 2, "t", {"h", 1}}), [](std::string_view bytes) { decode_measure(bytes); }},
      {encode_measured({}), [](std::string_view bytes) { decode_measured(bytes); }},
  };
  for (const auto& [bytes, decode] : all) {
    EXPECT_NO_THROW(decode(bytes));
    for (std::size_t size = 0; size < bytes.size(); ++size)
      EXPECT_THROW(decode(std::string_view(bytes).substr(0, size)), base::Error) << size;
    EXPECT_THROW(decode(bytes + "x"), base::Error);
  }
}

TEST(DoctorWire, AWildCountTakesNoMemory) {
  std::string bytes = encode_examined(Examination());
  bytes.replace(bytes.size() - 4, 4, "\xff\xff\xff\xff");
  EXPECT_THROW(decode_examined(bytes), base::Error);
}

/// A frame holds what six tools can say at most.
TEST(DoctorWire, AFullExaminationFitsInAFrame) {
  Examination found;
  for (ToolSaid* tool : {&found.libraries, &found.python, &found.probe, &found.smi, &found.resolved, &found.mpirun})
    tool->out = tool->err = std::string(kMostText, 'x');
  EXPECT_LT(encode_examined(found).size(), kMaxFrame / 2);
}

}  // namespace
}  // namespace lockstep::launcher
