#include "lockstep/train/report/resource_usage.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "lockstep/base/fd.h"

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

namespace lockstep::training {
namespace {

using base::Fd;

sockaddr_in address(const char* text, std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  ::inet_pton(AF_INET, text, &address.sin_addr);
  return address;
}

/// A connection from the loopback address `from` to 127.0.0.1.
struct Connection {
  explicit Connection(const char* from) {
    const Fd listener(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in server = address("127.0.0.1", 0), client = address(from, 0);
    socklen_t size = sizeof server;
    EXPECT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&server), size), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&server), &size), 0);
    EXPECT_EQ(::bind(sender.get(), reinterpret_cast<sockaddr*>(&client), sizeof client), 0);
    EXPECT_EQ(::connect(sender.get(), reinterpret_cast<sockaddr*>(&server), sizeof server), 0);
    receiver = Fd(::accept(listener.get(), nullptr, nullptr));
  }
  /// Returns when the bytes have been received, and so acknowledged: on loopback, both happen in send().
  void send(std::size_t bytes) const {
    const std::string text(bytes, 'x');
    ASSERT_EQ(::send(sender.get(), text.data(), bytes, 0), static_cast<ssize_t>(bytes));
    std::string received(bytes, ' ');
    ASSERT_EQ(::recv(receiver.get(), received.data(), bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
    const char answer = 'y';  // carries the acknowledgement, if none was sent before
    ASSERT_EQ(::send(receiver.get(), &answer, 1, 0), 1);
    char read = 0;
    ASSERT_EQ(::recv(sender.get(), &read, 1, MSG_WAITALL), 1);
  }
  Fd sender{::socket(AF_INET, SOCK_STREAM, 0)};
  Fd receiver;
};

constexpr std::uint64_t kAnswers = 100;  // more than the bytes that the receiver sends, in this process as well

TEST(SentBytes, CountsWhatOtherHostsReceiveFromTheFirstCallOn) {
  const Connection other("127.0.0.2"), own("127.0.0.1");
  other.send(5000);
  SentBytes sent;
  EXPECT_EQ(sent.total(), 0u);
  other.send(20000);
  own.send(7000);
  EXPECT_NEAR(static_cast<double>(sent.total()), 20000, kAnswers);
  EXPECT_NEAR(static_cast<double>(sent.total()), 20000, kAnswers) << "nothing was sent meanwhile";
}

TEST(SentBytes, KeepsWhatClosedConnectionsHaveSent) {
  SentBytes sent;
  sent.total();
  {
    const Connection other("127.0.0.2");
    other.send(20000);
    EXPECT_NEAR(static_cast<double>(sent.total()), 20000, kAnswers);
  }
  EXPECT_NEAR(static_cast<double>(sent.total()), 20000, kAnswers);
  const Connection next("127.0.0.2");
  next.send(30000);
  EXPECT_NEAR(static_cast<double>(sent.total()), 50000, kAnswers) << "a connection that may have the same inode";
}

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
}  // namespace lockstep::training
