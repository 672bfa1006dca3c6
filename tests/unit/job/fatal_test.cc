#include "lockstep/job/fatal.h"

#include <gtest/gtest.h>

#include <random>

#include "lockstep/job/local_store.h"

namespace lockstep::job {
namespace {

void expect_equal(const Fatal& a, const Fatal& b) {
  EXPECT_EQ(a.cause, b.cause);
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.host, b.host);
  EXPECT_EQ(a.pid, b.pid);
  EXPECT_EQ(a.gen, b.gen);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.op, b.op);
  EXPECT_EQ(a.detail, b.detail);
  EXPECT_EQ(a.hint, b.hint);
}

Fatal example() {
  return {.cause = base::Cause::kRankDied,
          .rank = 3,
          .host = "beta",
          .pid = 4711,
          .gen = 0,
          .step = 120,
          .op = "all_reduce(layer4.2.conv3.weight)#881",
          .detail = "killed by SIGKILL",
          .hint = "lower batch_size"};
}

TEST(FatalLine, MatchesTheReference) {
  EXPECT_EQ(format_fatal(example()),
            "FATAL cause=RANK_DIED rank=3 host=beta pid=4711 gen=0 step=120 op=all_reduce(layer4.2.conv3.weight)#881 "
            "detail=\"killed by SIGKILL\" hint=\"lower batch_size\"");
  EXPECT_EQ(format_fatal({}), "FATAL cause=INTERNAL rank=- host=- pid=- gen=0 step=- op=- detail=\"\" hint=\"\"");
}

TEST(FatalLine, RoundTrips) {
  expect_equal(*parse_fatal(format_fatal(example())), example());
  expect_equal(*parse_fatal(format_fatal({})), {});
}

TEST(FatalLine, SpecialCharactersRoundTrip) {
  for (const std::string& nasty :
       {std::string("\" hint=\"x"), std::string("\\"), std::string("\\\""), std::string("a\nb\r\tc\x1b[31m"),
        std::string("\0 zero", 6), std::string("\\x41\\n"), std::string("naïve 日本"), std::string("x\x7f")}) {
    Fatal fatal = example();
    fatal.detail = nasty;
    fatal.hint = nasty + nasty;
    const std::string line = format_fatal(fatal);
    EXPECT_EQ(line.find('\n'), std::string::npos);
    EXPECT_EQ(line.find('\x1b'), std::string::npos);
    ASSERT_TRUE(parse_fatal(line)) << line;
    expect_equal(*parse_fatal(line), fatal);
  }
}

TEST(FatalLine, RandomTextRoundTrips) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    Fatal fatal = example();
    for (std::size_t n = random() % 30; n > 0; --n) fatal.detail += static_cast<char>(random() % 128);
    ASSERT_TRUE(parse_fatal(format_fatal(fatal)));
    expect_equal(*parse_fatal(format_fatal(fatal)), fatal);
  }
}

TEST(FatalLine, UnquotedValuesStaySingleWords) {
  Fatal fatal = example();
  fatal.op = "\"a b\nc";
  fatal.host = "two words";
  const auto back = parse_fatal(format_fatal(fatal));
  ASSERT_TRUE(back);
  EXPECT_EQ(back->op, "_a_b_c");
  EXPECT_EQ(back->host, "two_words");
  EXPECT_EQ(back->detail, fatal.detail);
}

TEST(FatalLine, LongTextIsTruncated) {
  Fatal fatal = example();
  fatal.detail = std::string(1023, 'x') + "éé";
  EXPECT_EQ(parse_fatal(format_fatal(fatal))->detail, std::string(1023, 'x'));
}

TEST(FatalLine, RejectsOtherLines) {
  const std::string line = format_fatal(example());
  for (std::size_t cut = 0; cut + 1 < line.size(); ++cut) EXPECT_FALSE(parse_fatal(line.substr(0, cut))) << cut;
  for (const char* const text :
       {"", "FATAL", "FATAL ", "fatal cause=DESYNC", "WARN cause=DESYNC", "FATAL rank=1 cause=DESYNC"})
    EXPECT_FALSE(parse_fatal(text)) << text;
  EXPECT_EQ(
      parse_fatal("FATAL cause=NEW rank=x host=h pid=9999999999999999999 gen=0 step=0 op=o detail=\"d\" hint=\"\"")
          ->pid,
      -1);
}

TEST(FatalLine, InvalidNumbersBecomeUnknown) {
  const auto fatal =
      parse_fatal("FATAL cause=DESYNC rank=66666664666666662 host=h pid=-7 gen=- step=. op=- detail=\"\" hint=\"\"");
  ASSERT_TRUE(fatal);
  EXPECT_EQ(fatal->rank, -1);
  EXPECT_EQ(fatal->pid, -1);
  EXPECT_EQ(fatal->gen, 0);
  EXPECT_EQ(fatal->step, -1);
}

TEST(FirstCause, FirstPublishedCauseIsKept) {
  LocalStore store;
  Fatal second = example();
  second.detail = "another";
  expect_equal(publish_cause(store, example()), example());
  expect_equal(publish_cause(store, second), example());
  EXPECT_EQ(store.find(key::kCause, base::Deadline::in(std::chrono::seconds(1))), format_fatal(example()));
}

TEST(FirstCause, TheOneThatHasLedToItTakesItsPlace) {
  Fatal first = example();
  first.cause = base::Cause::kRankExited;
  first.rank = 2;
  first.detail = "ValueError: no label; then another";
  const auto after = [&](base::Cause cause, int rank, const char* detail) {
    LocalStore store;
    Fatal published = example();
    published.cause = cause;
    published.rank = rank;
    published.detail = detail;
    publish_cause(store, published);
    replace_cause(store, first);
    return publish_cause(store, example()).detail;
  };
  EXPECT_EQ(after(base::Cause::kDesync, 2, "calls differ"), first.detail);
  EXPECT_EQ(after(base::Cause::kDesync, 1, "rank 1 called a(), rank 2 called b()"), first.detail);
  EXPECT_EQ(after(base::Cause::kUnevenInput, 1, "rank 1 finished while rank 2 waits"), first.detail);
  // The rank only waited, or something else has failed.
  EXPECT_EQ(after(base::Cause::kDesync, 1, "rank 1 called a(), rank 22 called b()"),
            "rank 1 called a(), rank 22 called b()");
  EXPECT_EQ(after(base::Cause::kRankDied, 2, "killed by SIGKILL"), "killed by SIGKILL");
  LocalStore store;
  replace_cause(store, first);
  expect_equal(publish_cause(store, example()), first);
}

// As in a program that trains in a catch block.
TEST(FirstCause, ExceptionThatAllRanksHandleHasNotLedToIt) {
  // The second rank may read of the first one's exception before it notices the difference.
  for (const base::Cause second : {base::Cause::kRankExited, base::Cause::kPeerUnreachable}) {
    LocalStore store;
    Fatal difference = example();
    difference.cause = base::Cause::kDesync;
    difference.rank = 1;
    difference.detail = "rank 1 called a(), rank 2 called b()";
    publish_cause(store, difference);
    const auto cause_after = [&](int rank, base::Cause cause = base::Cause::kRankExited) {
      Fatal own = example();
      own.cause = cause;
      own.rank = rank;
      replace_cause(store, own);
      return publish_cause(store, example()).cause;
    };
    EXPECT_EQ(cause_after(3), base::Cause::kDesync);  // takes no part
    EXPECT_EQ(cause_after(2), base::Cause::kRankExited);
    EXPECT_EQ(cause_after(2), base::Cause::kRankExited);
    EXPECT_EQ(cause_after(1, second), base::Cause::kDesync);
    EXPECT_EQ(cause_after(2), base::Cause::kDesync);
    expect_equal(publish_cause(store, example()), difference);
  }
}

TEST(FirstCause, LossOfAPeerIsNone) {
  LocalStore store;
  Fatal own = example();
  own.cause = base::Cause::kPeerUnreachable;
  replace_cause(store, own);
  EXPECT_EQ(store.find(key::kCause, base::Deadline::in(std::chrono::seconds(1))), std::nullopt);
}

}  // namespace
}  // namespace lockstep::job
