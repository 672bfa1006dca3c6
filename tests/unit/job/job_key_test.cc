#include "lockstep/job/job_key.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "tests/support/temp_dir.h"

namespace lockstep::job {
namespace {

using ::testing::HasSubstr;

std::string hex(const Mac& mac) { return base::to_hex(mac_bytes(mac)); }

TEST(JobKey, MacIsHmacSha256) {
  // RFC 4231, test case 2. Its key is shorter than 32 bytes, which HMAC pads with zeros.
  std::string key = "Jefe";
  key.resize(32);
  const JobKey jefe(key);
  EXPECT_EQ(hex(jefe.mac({"what do ya ", "want for ", "", "nothing?"})),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_TRUE(equal_constant_time(jefe.mac({"text"}), mac_bytes(jefe.mac({"te", "xt"}))));
  EXPECT_FALSE(equal_constant_time(jefe.mac({"text"}), mac_bytes(jefe.mac({"texT"}))));
  EXPECT_FALSE(equal_constant_time(jefe.mac({"text"}), mac_bytes(jefe.mac({"text"})).substr(1)));
}

TEST(JobKey, RandomKeysDiffer) {
  const JobKey one = JobKey::random();
  EXPECT_TRUE(one.is_set());
  EXPECT_NE(one.bytes(), JobKey::random().bytes());
  EXPECT_FALSE(JobKey().is_set());
  EXPECT_EQ(JobKey(one.bytes()).bytes(), one.bytes());
  EXPECT_THROW(JobKey("short"), base::UsageError);
}

class KeyFile : public ::testing::Test {
 protected:
  std::string write(const std::string& text, mode_t mode = 0600) {
    const std::string path = dir_ / "key";
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
    return path;
  }
  void expect_refused(const std::string& path, const std::string& why) {
    EXPECT_THAT(tests::message_of<base::UsageError>([&] { JobKey::from_file(path); }),
                testing::AllOf(HasSubstr(why), HasSubstr(path)));
  }
  const tests::TempDir dir_;
};

TEST_F(KeyFile, SameFileGivesSameKey) {
  const std::string text(32, 'x');
  const JobKey key = JobKey::from_file(write(text));
  EXPECT_TRUE(key.is_set());
  EXPECT_EQ(key.bytes(), JobKey::from_file(write(text, 0400)).bytes());
  EXPECT_NE(key.bytes(), JobKey::from_file(write(text + "y")).bytes());
  EXPECT_TRUE(JobKey::from_file(write(std::string(4096, 'x'))).is_set());
}

TEST_F(KeyFile, SecretOfAPodIsAccepted) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to make a file of root";
  const std::string path = write(std::string(32, 'x'), 0440);
  ASSERT_EQ(::chown(path.c_str(), 0, 1000), 0);
  EXPECT_TRUE(JobKey::from_file(path).is_set());
}

TEST_F(KeyFile, UnsafeFilesAreRejected) {
  const std::string text(32, 'x');
  for (const mode_t mode : {0640, 0604, 0620, 0660, 0644})
    expect_refused(write(text, mode), "is readable or writable by users other than its owner");
  expect_refused(write(text.substr(1)), "has 31 bytes; expected 32 to 4096");
  expect_refused(write(std::string(4097, 'x')), "has 4097 bytes");
  expect_refused(dir_ / "nothing", "cannot be read");
  expect_refused(dir_.path(), "is not a regular file");
}

}  // namespace
}  // namespace lockstep::job
