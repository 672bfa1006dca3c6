#include "lockstep/job/identity/pmi.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/fd.h"
#include "tests/support/temp_dir.h"

namespace lockstep::job::identity {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Lines = std::vector<std::string>;

constexpr auto kLimit = std::chrono::seconds(10);

/// Runs a launcher that replies to each line with the next of `answers`, and then sends nothing until the rank closes
/// the connection. Returns the lines that it received.
Lines run_fake_launcher(const Lines& answers, const std::function<void(int fd)>& rank) {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  base::Fd launcher(ends[0]);
  base::Fd other(ends[1]);
  Lines received;
  std::thread thread([&] {
    std::string line;
    for (char c; ::recv(launcher.get(), &c, 1, 0) == 1;) {
      if (c != '\n') {
        line += c;
        continue;
      }
      received.push_back(std::exchange(line, ""));
      if (received.size() > answers.size()) continue;
      for (const char byte : answers[received.size() - 1])
        ::send(launcher.get(), &byte, 1, MSG_NOSIGNAL);  // a line may arrive in several segments
    }
  });
  rank(other.get());
  other.reset();
  thread.join();
  return received;
}

const Lines kAnswers = {"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n", "cmd=my_kvsname kvsname=kvs_1\n",
                        "cmd=barrier_out\n", "cmd=get_result rc=0 msg=success value=686f0a00\n", "cmd=finalize_ack\n"};

Lines with_reply(std::size_t index, const std::string& answer) {
  Lines answers = kAnswers;
  answers[index] = answer;
  return answers;
}

void expect_failure(const Lines& answers, Cause cause, const std::string& part,
                    std::chrono::milliseconds limit = kLimit) {
  run_fake_launcher(answers, [&](int fd) {
    const auto error = tests::thrown<CommError>([&] { pmi_broadcast(fd, 1, "", Deadline::in(limit)); });
    EXPECT_EQ(error.cause(), cause) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(part));
  });
}

TEST(Pmi, RankZeroPutsItsText) {
  Lines answers = kAnswers;
  answers.insert(answers.begin() + 2, "cmd=put_result rc=0 msg=success\n");
  const Lines received = run_fake_launcher(answers, [](int fd) {
    EXPECT_EQ(pmi_broadcast(fd, 0, std::string("ho\n\0", 4), Deadline::in(kLimit)), std::string("ho\n\0", 4));
  });
  EXPECT_THAT(received, ElementsAre("cmd=init pmi_version=1 pmi_subversion=1", "cmd=get_my_kvsname",
                                    "cmd=put kvsname=kvs_1 key=lockstep-store-address value=686f0a00", "cmd=barrier_in",
                                    "cmd=get kvsname=kvs_1 key=lockstep-store-address", "cmd=finalize"));
}

TEST(Pmi, OtherRanksGetTheText) {
  const Lines received = run_fake_launcher(
      kAnswers, [](int fd) { EXPECT_EQ(pmi_broadcast(fd, 1, "", Deadline::in(kLimit)), std::string("ho\n\0", 4)); });
  EXPECT_EQ(received.size(), 5u);
}

TEST(Pmi, InvalidRepliesAreErrors) {
  expect_failure(with_reply(0, "cmd=response_to_init rc=-1\n"), Cause::kProtocol,
                 "replied \"cmd=response_to_init rc=-1\" to \"cmd=init pmi_version=1 pmi_subversion=1\"");
  expect_failure(with_reply(1, "nonsense\n"), Cause::kProtocol, "replied \"nonsense\"");
  expect_failure(with_reply(1, std::string(5000, 'x') + "\n"), Cause::kProtocol,
                 "replied with a line of more than 4096 bytes");
  expect_failure(with_reply(3, "cmd=get_result rc=-1 msg=key_not_found value=unknown\n"), Cause::kProtocol,
                 "key_not_found");
  expect_failure({kAnswers[0], kAnswers[1]}, Cause::kJoinTimeout, "did not reply in time",
                 std::chrono::milliseconds(50));
}

TEST(Pmi, LostLauncherIsAnError) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const base::Fd rank(ends[1]);
  base::Fd(ends[0]).reset();
  const auto ask = [](int fd) {
    return tests::message_of<CommError>([&] { pmi_broadcast(fd, 1, "", Deadline::in(kLimit)); });
  };
  EXPECT_THAT(ask(rank.get()), HasSubstr("does not accept requests: Broken pipe"));
  EXPECT_THAT(ask(1000000), HasSubstr("PMI_FD is 1000000) does not accept requests: Bad file descriptor"));
}

TEST(Pmi, ParsesFields) {
  EXPECT_EQ(pmi_field("cmd=maxes kvsname_max=256 keylen_max=64", "keylen_max"), "64");
  EXPECT_EQ(pmi_field("cmd=maxes kvsname_max=256", "kvsname"), "");
  EXPECT_EQ(pmi_field("value=a=b", "value"), "a=b");
  EXPECT_EQ(pmi_field("", "cmd"), "");
}

}  // namespace
}  // namespace lockstep::job::identity
