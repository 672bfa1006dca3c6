#include "lockstep/base/net/boot_id.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"

namespace lockstep::base::net {
namespace {

TEST(BootId, IsThatOfTheRunningKernelWithoutTheLineBreak) {
  EXPECT_EQ(boot_id() + "\n", tests::read_file("/proc/sys/kernel/random/boot_id"));
  EXPECT_THAT(boot_id(), testing::SizeIs(36));
}

}  // namespace
}  // namespace lockstep::base::net
