#include "lockstep/base/net/unix_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/base/shared_memory.h"
#include "tests/support/temp_dir.h"

namespace lockstep::base::net {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const SystemError& error) {
    return error.what();
  }
  return "";
}

TEST(SharedMemory, TwoMappingsShareContent) {
  const SharedMemory one = SharedMemory::create("test", 1 << 20);
  const SharedMemory other = SharedMemory::map(Fd(::fcntl(one.fd().get(), F_DUPFD_CLOEXEC, 0)), 1 << 20);
  EXPECT_NE(one.data(), other.data());
  std::strcpy(one.data() + 500000, "hello");
  EXPECT_STREQ(other.data() + 500000, "hello");
}

TEST(SharedMemory, RefusesUnsealedAndWrongSize) {
  const SharedMemory one = SharedMemory::create("test", 1 << 20);
  EXPECT_NE(::ftruncate(one.fd().get(), 10), 0) << "sealed";
  EXPECT_THAT(error_of([&] { SharedMemory::map(Fd(::fcntl(one.fd().get(), F_DUPFD_CLOEXEC, 0)), 2 << 20); }),
              HasSubstr("not sealed shared memory of 2097152 bytes"));
  Fd loose(::memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(loose.get(), 1 << 20), 0);
  EXPECT_THAT(error_of([&] { SharedMemory::map(std::move(loose), 1 << 20); }), HasSubstr("not sealed shared memory"));
}

TEST(UnixListener, AcceptsOnlyThisUserAndCleansUp) {
  const tests::TempDir folder;
  std::string path;
  {
    const UnixListener listener(folder.path());
    path = listener.path();
    struct stat status{};
    ASSERT_EQ(::stat(std::filesystem::path(path).parent_path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700u);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_THAT(error_of([&] { connect_unix(path); }), HasSubstr("cannot connect to " + path));
}

TEST(UnixListener, SendsAFileDescriptor) {
  const tests::TempDir folder;
  UnixListener listener(folder.path());
  const Fd client = connect_unix(listener.path());
  const Fd server = listener.accept(Deadline::in(5s));
  const SharedMemory memory = SharedMemory::create("test", 4096);
  send_fd(client.get(), 4096, memory.fd().get());
  FdMessage message = receive_fd(server.get(), Deadline::in(5s));
  EXPECT_EQ(message.label, 4096u);
  EXPECT_NE(::fcntl(message.fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  memory.data()[7] = 'x';
  EXPECT_EQ(SharedMemory::map(std::move(message.fd), message.label).data()[7], 'x');
}

TEST(UnixListener, TimeoutAndGarbageThrow) {
  const tests::TempDir folder;
  UnixListener listener(folder.path());
  EXPECT_THAT(error_of([&] { listener.accept(Deadline::in(10ms)); }), HasSubstr("no process connected"));
  Fd client = connect_unix(listener.path());
  const Fd server = listener.accept(Deadline::in(5s));
  EXPECT_THAT(error_of([&] { receive_fd(server.get(), Deadline::in(10ms)); }), HasSubstr("sent no descriptor in time"));
  ASSERT_EQ(::write(client.get(), "no descriptor!!!", 16), 16);
  EXPECT_THAT(error_of([&] { receive_fd(server.get(), Deadline::in(5s)); }), HasSubstr("sent no descriptor: "));
  client.reset();
  EXPECT_THAT(error_of([&] { receive_fd(server.get(), Deadline::in(5s)); }), HasSubstr("sent no descriptor: "));
}

}  // namespace
}  // namespace lockstep::base::net
