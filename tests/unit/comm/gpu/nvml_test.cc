#include "lockstep/comm/gpu/nvml.h"

#include <gtest/gtest.h>

#include <cstring>

// The functions of NVML, for a GPU with 3 GiB in use that is busy for 40 % of the time, and one that does not say so.
extern "C" {
[[gnu::visibility("default")]] int nvmlInit_v2() { return 0; }
[[gnu::visibility("default")]] int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  static int gpu = 0, mig = 0;
  *device = std::strcmp(uuid, "GPU-1") == 0 ? &gpu : &mig;
  return std::strncmp(uuid, "GPU-", 4) == 0 ? 0 : 6;  // NVML_ERROR_NOT_FOUND
}
[[gnu::visibility("default")]] int nvmlDeviceGetUtilizationRates(void* device, unsigned* percents) {
  void* gpu = nullptr;
  nvmlDeviceGetHandleByUUID("GPU-1", &gpu);
  percents[0] = 40;
  percents[1] = 7;
  return device == gpu ? 0 : 3;  // NVML_ERROR_NOT_SUPPORTED
}
[[gnu::visibility("default")]] int nvmlDeviceGetMemoryInfo(void*, unsigned long long* bytes) {
  bytes[0] = 8ULL << 30;
  bytes[1] = 5ULL << 30;
  bytes[2] = 3ULL << 30;
  return 0;
}
}

namespace lockstep::comm::gpu {
namespace {

constexpr const char* kThisProgram = nullptr;  // for dlopen()

TEST(GpuMonitor, ReadsTimeAndMemory) {
  const auto use = GpuMonitor("GPU-1", kThisProgram).read();
  ASSERT_TRUE(use);
  EXPECT_DOUBLE_EQ(use->busy, 0.4);
  EXPECT_EQ(use->memory_bytes, 3ULL << 30);
}

TEST(GpuMonitor, HasNothingWithoutAnAnswer) {
  EXPECT_FALSE(GpuMonitor("MIG-1", kThisProgram).read());
  EXPECT_FALSE(GpuMonitor("GPU-2", kThisProgram).read());
  EXPECT_FALSE(GpuMonitor("GPU-1", "libno-such-library.so").read());
  EXPECT_FALSE(GpuMonitor("GPU-1", "libm.so.6").read()) << "a library without the functions";
}

}  // namespace
}  // namespace lockstep::comm::gpu
