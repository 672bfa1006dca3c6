#include "lockstep/comm/device_selection.h"

#include <gmock/gmock.h>

#include "lockstep/base/error.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {
namespace {

using ::testing::HasSubstr;

TEST(DeviceSelection, ParsesDeviceStrings) {
  EXPECT_FALSE(parse_device("auto").cpu || parse_device("auto").gpu);
  EXPECT_TRUE(parse_device("cpu").cpu);
  EXPECT_TRUE(parse_device("cuda").gpu);
  EXPECT_EQ(parse_device("cuda").index, -1);
  EXPECT_EQ(parse_device("cuda:5").index, 5);
  for (const char* wrong : {"gpu", "", "cuda:", "cuda:-1", "cuda:x", "cuda:128", "CPU", "cpu "})
    EXPECT_THROW(parse_device(wrong), base::UsageError) << wrong;
}

TEST(DeviceSelection, CpuSkipsGpuDetection) {
  World world;
  EXPECT_FALSE(detect_gpus(world, parse_device("cpu")));
  EXPECT_THAT(world.gpu_unavailable_reason, HasSubstr("LOCKSTEP_DEVICE"));
}

}  // namespace
}  // namespace lockstep::comm
