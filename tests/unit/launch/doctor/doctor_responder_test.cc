#include "lockstep/launch/doctor/doctor_responder.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep::launcher::doctor {
namespace {

using Kind = protocol::FrameKind;

TEST(DoctorResponder, FramesThatAreNotRequestsAreRefused) {
  std::vector<Kind> replies;
  const DoctorResponder responder([&](Kind kind, const std::string&) { replies.push_back(kind); }, -1);
  responder.handle({Kind::kClockRequest, -1, {}});
  for (const Kind kind : {Kind::kStart, Kind::kStop, Kind::kStdin, Kind::kClockReply, Kind::kDone}) {
    try {
      responder.handle({kind, -1, {}});
      ADD_FAILURE() << static_cast<int>(kind);
    } catch (const base::Error& error) {
      EXPECT_EQ(error.cause(), base::Cause::kProtocol);
      EXPECT_NE(std::string(error.what()).find("unexpected frame"), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(replies, std::vector{Kind::kClockReply});
}

}  // namespace
}  // namespace lockstep::launcher::doctor
