#include "lockstep/launch/supervise/verdict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cerrno>
#include <vector>

namespace lockstep::launcher::supervise {
namespace {

using ::testing::HasSubstr;

protocol::RankExit exited(int rank, int code) { return {rank, 100 + rank, code, 0}; }
protocol::RankExit died(int rank, int signal) { return {rank, 100 + rank, 0, signal}; }

TEST(Verdict, FirstFailureInOrder) {
  const std::vector<protocol::RankExit> exits = {exited(0, 0), exited(2, 7), exited(1, 9)};
  EXPECT_EQ(first_failure(exits)->rank, 2);
  EXPECT_EQ(first_failure({exited(0, 0)}), nullptr);
  EXPECT_EQ(first_failure({}), nullptr);
}

TEST(Verdict, SignalOutranksExitAndAbort) {
  const std::vector<protocol::RankExit> exits = {exited(0, 1), died(1, SIGABRT), died(2, SIGKILL), died(3, SIGSEGV)};
  EXPECT_EQ(first_failure(exits)->rank, 2);
  const std::vector<protocol::RankExit> aborts = {exited(0, 1), died(1, SIGABRT)};
  EXPECT_EQ(first_failure(aborts)->rank, 0);
}

TEST(Verdict, KilledRankIsNamed) {
  protocol::RankExit killed = died(3, SIGKILL);
  killed.oom_kills = 1;
  const Verdict verdict =
      judge_exit(killed, {.tail = "", .published = {}, .locations = {{"a"}, {"a"}, {"b"}, {"beta"}}});
  EXPECT_EQ(verdict.exit_code, 137);
  const std::string line = job::format_fatal(verdict.fatal);
  EXPECT_THAT(line, HasSubstr("FATAL cause=RANK_DIED rank=3 host=beta pid=103 gen=0 step=- op=- detail=\"killed by "
                              "SIGKILL; the kernel counts 1 out-of-memory kill\""));
  EXPECT_THAT(line, HasSubstr("lower batch_size"));
}

TEST(Verdict, ExitCodeIsReturned) {
  const Verdict verdict =
      judge_exit(exited(1, 7), {.tail = "[a:1] it fails\n", .prefix = "[a:1] ", .published = {}, .locations = {}});
  EXPECT_EQ(verdict.exit_code, 7);
  EXPECT_EQ(verdict.fatal.cause, base::Cause::kRankExited);
  EXPECT_EQ(verdict.fatal.detail, "exited with code 7");
  EXPECT_THAT(verdict.fatal.hint, HasSubstr("stderr"));
}

TEST(Verdict, ARankThatEndedTooEarlyIsNamedInsteadOfTheOneThatLostIt) {
  const std::string lost = "[0] RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4711\n";
  const auto judge = [&](const std::string& tail, const std::vector<int>& early_ends) {
    protocol::RankExit end = exited(0, 1);
    add_lost_peer(end, tail, "[0] ");
    return judge_exit(end, {.tail = tail,
                            .prefix = "[0] ",
                            .published = {},
                            .locations = {{"a", 50}, {"b", 51}, {"b", 52}},
                            .early_ends = early_ends});
  };
  const Verdict verdict = judge(lost, {1});
  EXPECT_EQ(verdict.fatal.cause, base::Cause::kUnevenInput);
  EXPECT_EQ(verdict.fatal.rank, 1);
  EXPECT_EQ(verdict.fatal.host, "b");
  EXPECT_EQ(verdict.fatal.pid, 51);
  EXPECT_EQ(verdict.exit_code, 70);
  EXPECT_THAT(verdict.fatal.detail, HasSubstr("exited with code 0 while rank 0 still needed it; rank 0: RuntimeError: "
                                              "[gloo/pair.cc:534] Connection closed by peer"));
  EXPECT_EQ(judge(lost, {}).fatal.cause, base::Cause::kRankExited);
  EXPECT_EQ(judge("[0] ValueError: x\n", {1}).fatal.cause, base::Cause::kRankExited);
  const Verdict unknown = judge(lost, {1, 2});
  EXPECT_EQ(unknown.fatal.cause, base::Cause::kUnevenInput);
  EXPECT_EQ(unknown.fatal.rank, -1);
  EXPECT_THAT(unknown.fatal.detail, HasSubstr("ranks 1,2 exited with code 0 while rank 0 still needed one of them"));
}

TEST(Verdict, OfSeveralRanksThatEndedTheOneThatTheErrorNames) {
  protocol::RankExit first = exited(0, 0), second = exited(2, 0), failure = exited(1, 1);
  first.ports = {29500, 4711};
  second.ports = {29501};
  failure.lost_peer = true;
  const auto ends = [&](int port) {
    failure.lost_port = port;
    return early_ends({first, second, failure, exited(3, 0)}, failure);
  };
  EXPECT_EQ(ends(4711), std::vector<int>{0});
  EXPECT_EQ(ends(0x6712), std::vector<int>{0});  // 4711 is 0x1267
  EXPECT_EQ(ends(29501), std::vector<int>{2});
  EXPECT_EQ(ends(1), (std::vector<int>{0, 2}));
  EXPECT_EQ(ends(0), (std::vector<int>{0, 2}));
  // Rank 2 has closed its connections, but its process ends later.
  failure.lost_port = 29501;
  EXPECT_TRUE(is_culprit_missing({first, failure}, 3));
  EXPECT_EQ(early_ends({first, failure, second}, failure), std::vector<int>{2});
  first.ports = {};  // a program whose ports are not known
  EXPECT_FALSE(is_culprit_missing({first, failure}, 3));
}

TEST(Verdict, TheRankWhoseEndOthersReportIsAwaited) {
  protocol::RankExit victim = exited(0, 1);
  victim.lost_peer = true;
  EXPECT_TRUE(is_culprit_missing({victim}, 3));
  EXPECT_FALSE(is_culprit_missing({victim}, 1));  // all have ended
  EXPECT_FALSE(is_culprit_missing({victim, exited(2, 1)}, 3));
  EXPECT_FALSE(is_culprit_missing({exited(1, 0), victim}, 3));  // rank 1 has ended too early
  EXPECT_FALSE(is_culprit_missing({}, 3));
  EXPECT_EQ(first_failure({victim, exited(2, 1)})->rank, 2);
  EXPECT_EQ(first_failure({victim, exited(2, 1), died(1, SIGKILL)})->rank, 1);
}

TEST(Verdict, ExceptionAndRemedyOfAPythonProgram) {
  const ExitEvidence evidence{
      .tail = "[1]   File \"a.py\", line 1, in f\n[1] ModuleNotFoundError: No module named 'x'\n",
      .prefix = "[1] ",
      .published = {},
      .locations = {}};
  const Verdict verdict = judge_exit(exited(1, 1), evidence);
  EXPECT_EQ(verdict.fatal.detail, "exited with code 1: ModuleNotFoundError: No module named 'x'");
  EXPECT_THAT(verdict.fatal.hint, HasSubstr("activate its environment"));
  ExitEvidence own = evidence;
  own.own_errors = {{"named 'x'", "pip install x"}};
  EXPECT_EQ(judge_exit(exited(1, 1), own).fatal.hint, "pip install x");
}

TEST(Verdict, AbortMessageIsTheDetail) {
  const auto detail_of = [](const std::string& tail) {
    return judge_exit(died(2, SIGABRT), {.tail = tail, .prefix = "[2] ", .published = {}, .locations = {}})
        .fatal.detail;
  };
  EXPECT_EQ(detail_of(""), "killed by SIGABRT");
  EXPECT_EQ(detail_of("[2] a.cc:7: check failed\n[2]   \n"),
            "killed by SIGABRT; its last message: a.cc:7: check failed");
  EXPECT_EQ(
      detail_of("[2] terminate called after throwing an instance of 'c10::Error'\n[2]   what():  no\n[2] frame #0\n"),
      "killed by SIGABRT; its last message: what():  no");
}

TEST(Verdict, MessageOfAnErrorFileIsTheDetail) {
  protocol::RankExit end = exited(1, 1);
  const auto detail = [&](const char* message) {
    end.message = message;
    return judge_exit(end, {.tail = "[1] x\n", .prefix = "[1] ", .published = {}, .locations = {}}).fatal.detail;
  };
  EXPECT_EQ(detail("ValueError: no such\nfile"), "exited with code 1: ValueError: no such");
  EXPECT_EQ(detail("no such\nfile"), "exited with code 1: no such");
  EXPECT_EQ(
      detail("RuntimeError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
             "last):\n  File \"a.py\", line 1, in f\nValueError: bad\n"),
      "exited with code 1: RuntimeError: Caught ValueError in DataLoader worker process 0. (ValueError: bad)");
}

// However the error of a rank reaches the launcher.
TEST(Verdict, EveryKnownErrorHasItsRemedy) {
  for (const KnownError& row : known_errors()) {
    const std::string error = "RuntimeError: " + row.text + " x";
    protocol::RankExit end = exited(1, 1);
    const ExitEvidence printed{.tail = "[1]   File \"a.py\", line 1, in f\n[1] " + error + "\n",
                               .prefix = "[1] ",
                               .published = {},
                               .locations = {}};
    EXPECT_EQ(judge_exit(end, printed).fatal.hint, row.remedy);
    EXPECT_EQ(judge_exit(end, printed).fatal.detail, "exited with code 1: " + error);
    ExitEvidence published = printed;
    published.published = job::Fatal{.cause = base::Cause::kRankExited, .rank = 1, .detail = error};
    EXPECT_EQ(judge_exit(end, published).fatal.hint, row.remedy);
    published.tail.clear();  // its stderr goes to a file
    EXPECT_EQ(judge_exit(end, published).fatal.hint, row.remedy);
    end.message = error;
    EXPECT_EQ(judge_exit(end, {.tail = "", .published = {}, .locations = {}}).fatal.hint, row.remedy);
    protocol::RankExit aborted = died(1, SIGABRT);
    EXPECT_EQ(judge_exit(aborted, {.tail = "  what():  " + error + "\n", .published = {}, .locations = {}}).fatal.hint,
              row.remedy);
  }
}

TEST(Verdict, LineOfAKnownErrorIsQuoted) {
  const ExitEvidence evidence{.tail =
                                  "[1]   File \"a.py\", line 1, in f\n"
                                  "[1] RuntimeError: Error(s) in loading state_dict for Linear:\n"
                                  "[1] \tMissing key(s) in state_dict: \"module.weight\"\n",
                              .prefix = "[1] ",
                              .published = {},
                              .locations = {}};
  EXPECT_EQ(
      judge_exit(exited(1, 1), evidence).fatal.detail,
      "exited with code 1: RuntimeError: Error(s) in loading state_dict for Linear: (Missing key(s) in state_dict: "
      "\"module.weight\")");
}

TEST(Verdict, HintOfAPublishedErrorIsKeptWhereNoneIsKnown) {
  const auto hint_of = [](base::Cause cause, const std::string& hint, const std::string& tail) {
    return judge_exit(exited(1, 1), {.tail = tail,
                                     .published = job::Fatal{.cause = cause, .rank = 1, .detail = "x", .hint = hint},
                                     .locations = {}})
        .fatal.hint;
  };
  EXPECT_EQ(hint_of(base::Cause::kDesync, "make the same calls", "Broken pipe\n"), "make the same calls");
  EXPECT_EQ(hint_of(base::Cause::kRankExited, "", "a line\n"), "the last lines of its stderr are above");
  EXPECT_EQ(hint_of(base::Cause::kRankExited, "", ""), "");
  EXPECT_EQ(hint_of(base::Cause::kCkptWriteFailed, "", "a line\n"), "");
}

TEST(Verdict, AVictimMayHavePublishedItsError) {
  job::Fatal fatal{.cause = base::Cause::kRankExited, .rank = 0, .detail = "RuntimeError: Connection closed by peer"};
  EXPECT_TRUE(is_victim_of_another(fatal));
  fatal.detail = "ValueError: no label; then " + fatal.detail;
  EXPECT_FALSE(is_victim_of_another(fatal));
  fatal = {.cause = base::Cause::kPeerUnreachable, .detail = "Connection closed by peer"};
  EXPECT_FALSE(is_victim_of_another(fatal));
}

TEST(Verdict, LinesBeforeTheExceptionDoNotMakeAVictim) {
  const auto lost_peer = [](const std::string& tail) {
    protocol::RankExit end = exited(1, 1);
    add_lost_peer(end, tail, "[1] ");
    return end.lost_peer;
  };
  const std::string traceback = "[1] retry: Connection reset by peer\n[1]   File \"a.py\", line 1, in f\n[1] ";
  EXPECT_FALSE(lost_peer(traceback + "ValueError: bad value\n"));
  EXPECT_TRUE(lost_peer(traceback + "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:2093\n"));
  EXPECT_TRUE(lost_peer("[1] Connection reset by peer\n"));
  EXPECT_FALSE(
      lost_peer("[1]   File \"a.py\", line 1, in f\n[1] ValueError: bad\n[1] \n[1] During handling of the above "
                "exception, another exception occurred:\n[1] \n[1] Traceback (most recent call last):\n[1]   File "
                "\"a.py\", line 1, in g\n[1] RuntimeError: Connection closed by peer\n"));
}

// A rank that raised is killed where it takes longer to end than the grace.
TEST(Verdict, CodeOfARankThatWasKilledWhileItEnded) {
  Verdict verdict{.fatal = {.cause = base::Cause::kRankExited, .rank = 1}};
  use_own_exit_code(verdict, {exited(0, 69), died(1, SIGTERM)});
  EXPECT_EQ(verdict.exit_code, 1);
  use_own_exit_code(verdict, {exited(0, 69), exited(1, 7)});
  EXPECT_EQ(verdict.exit_code, 7);
  verdict.fatal.cause = base::Cause::kRankDied;
  use_own_exit_code(verdict, {exited(0, 69), died(1, SIGSEGV)});
  EXPECT_EQ(verdict.exit_code, 139);
}

TEST(Verdict, PublishedCauseIsPreferred) {
  job::Fatal cause;
  cause.cause = base::Cause::kDesync;
  cause.rank = 0;
  cause.detail = "calls differ";
  const Verdict verdict =
      judge_exit(died(1, SIGABRT), {.tail = "", .published = cause, .locations = {{"a", 50}, {"a", 51}}});
  EXPECT_EQ(verdict.exit_code, 70);
  EXPECT_EQ(verdict.fatal.pid, 50);
  EXPECT_EQ(verdict.fatal.host, "a");
  EXPECT_EQ(verdict.fatal.detail, "calls differ");
}

TEST(Verdict, PublishedFieldsAreKept) {
  job::Fatal cause;
  cause.cause = base::Cause::kRankDied;
  cause.rank = 99;
  cause.host = "b";
  const Verdict verdict =
      judge_exit(exited(1, 9), {.tail = "", .published = cause, .locations = {{"a", 50}, {"a", 51}}});
  EXPECT_EQ(verdict.fatal.host, "b");
  EXPECT_EQ(verdict.fatal.pid, -1);
  EXPECT_EQ(verdict.exit_code, 9);
}

TEST(Verdict, OperationOfTheRankIsReported) {
  base::telemetry::OperationRecord finished{
      .number = 6, .seq = 6, .bytes = 8, .started = 1, .ended = 2, .channel = "world", .kind = "barrier"};
  base::telemetry::OperationRecord unfinished{.number = 7,
                                              .seq = 7,
                                              .bytes = 256,
                                              .started = 3,
                                              .channel = "world",
                                              .kind = "all_reduce",
                                              .dtype = "float32",
                                              .name = "votes"};
  job::Fatal in_user_code{.rank = 1, .detail = "it died"};
  add_step_and_operation(in_user_code, {{.rank = 1, .steps = 4, .operations = {finished}}});
  EXPECT_EQ(in_user_code.step, 4);
  EXPECT_EQ(in_user_code.op, "");
  EXPECT_EQ(in_user_code.detail, "it died; the last operation that it finished was barrier#6 of world, 8 bytes");
  job::Fatal in_operation{.rank = 1, .detail = "it died"};
  add_step_and_operation(in_operation, {{.rank = 1, .steps = 4, .operations = {finished, unfinished}}});
  EXPECT_EQ(in_operation.op, "all_reduce(votes)#7");
  EXPECT_EQ(in_operation.detail, "it died");
}

TEST(Verdict, StackOfTheAwaitedRankIsRequested) {
  const auto stacks_of = [](base::Cause cause, int rank, std::vector<protocol::RankExit> exits) {
    Verdict verdict;
    verdict.fatal = {.cause = cause, .rank = rank, .hint = "more"};
    request_stack(verdict, exits, "runs/it", {{"a"}, {"a"}, {"a"}});
    EXPECT_EQ(verdict.fatal.hint, verdict.stacks.empty() ? "more" : "its stack is in runs/it/stack.2.txt; more");
    return verdict.stacks;
  };
  EXPECT_EQ(stacks_of(base::Cause::kRankStuck, 2, {{0, 1, 1, 0}}), std::vector<int>{2});
  EXPECT_EQ(stacks_of(base::Cause::kRankStuck, 2, {{2, 1, 1, 0}}), std::vector<int>{});
  EXPECT_EQ(stacks_of(base::Cause::kRankStuck, -1, {}), std::vector<int>{});
  EXPECT_EQ(stacks_of(base::Cause::kDesync, 2, {}), std::vector<int>{});
}

TEST(Verdict, StackLocationNamesTheHost) {
  EXPECT_EQ(stack_location("runs/it", 1, {{"a"}, {"a"}}), "runs/it/stack.1.txt");
  EXPECT_EQ(stack_location("runs/it", 1, {{"a"}, {"b"}}), "runs/it/stack.1.txt on b");
}

}  // namespace
}  // namespace lockstep::launcher::supervise
