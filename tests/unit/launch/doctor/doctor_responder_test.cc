#include "lockstep/launch/doctor/doctor_responder.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::doctor {
namespace {

using Kind = protocol::FrameKind;

TEST(DoctorResponder, FramesThatAreNotRequestsAreRefused) {
  std::vector<Kind> replies;
  const DoctorResponder responder([&](Kind kind, const std::string&) { replies.push_back(kind); }, -1);
  responder.handle({Kind::kClockRequest, -1, {}});
  for (const Kind kind : {Kind::kStart, Kind::kStop, Kind::kStdin, Kind::kClockReply, Kind::kDone}) {
    const auto error = tests::thrown<base::Error>([&] { responder.handle({kind, -1, {}}); });
    EXPECT_EQ(error.cause(), base::Cause::kProtocol);
    EXPECT_NE(std::string(error.what()).find("unexpected frame"), std::string::npos) << error.what();
  }
  EXPECT_EQ(replies, std::vector{Kind::kClockReply});
}

}  // namespace
}  // namespace lockstep::launcher::doctor
