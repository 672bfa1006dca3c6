#include "lockstep/base/net/unix_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/base/net/abstract_socket.h"
#include "lockstep/base/shared_memory.h"
#include "tests/support/temp_dir.h"

namespace lockstep::base::net {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

std::string error_of(const std::function<void()>& call) { return tests::message_of<SystemError>(call); }

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

TEST(UnixSocket, SendsAFileDescriptor) {
  const AbstractListener listener("lockstep-test-");
  const Fd client = connect_abstract(listener.name());
  const Fd server = listener.accept(Deadline::in(5s));
  const SharedMemory memory = SharedMemory::create("test", 4096);
  send_fd(client.get(), 4096, memory.fd().get());
  FdMessage message = receive_fd(server.get(), Deadline::in(5s));
  EXPECT_EQ(message.label, 4096u);
  EXPECT_NE(::fcntl(message.fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  memory.data()[7] = 'x';
  EXPECT_EQ(SharedMemory::map(std::move(message.fd), message.label).data()[7], 'x');
}

TEST(UnixSocket, TimeoutAndGarbageThrow) {
  const AbstractListener listener("lockstep-test-");
  EXPECT_THAT(error_of([&] { listener.accept(Deadline::in(10ms)); }), HasSubstr("no process connected"));
  Fd client = connect_abstract(listener.name());
  const Fd server = listener.accept(Deadline::in(5s));
  EXPECT_THAT(error_of([&] { receive_fd(server.get(), Deadline::in(10ms)); }), HasSubstr("sent no descriptor in time"));
  ASSERT_EQ(::write(client.get(), "no descriptor!!!", 16), 16);
  EXPECT_THAT(error_of([&] { receive_fd(server.get(), Deadline::in(5s)); }), HasSubstr("sent no descriptor: "));
  client.reset();
  EXPECT_THAT(error_of([&] { receive_fd(server.get(), Deadline::in(5s)); }), HasSubstr("sent no descriptor: "));
}

TEST(UnixSocket, DisappearsWithItsListener) {
  std::string name;
  {
    const AbstractListener listener("lockstep-test-");
    name = listener.name();
    EXPECT_NE(name, AbstractListener("lockstep-test-").name());
  }
  EXPECT_THAT(error_of([&] { connect_abstract(name); }), HasSubstr("cannot connect to the Unix socket @" + name));
  EXPECT_THAT(error_of([&] { connect_abstract(std::string(108, 'x')); }), HasSubstr("cannot connect"));
}

}  // namespace
}  // namespace lockstep::base::net
