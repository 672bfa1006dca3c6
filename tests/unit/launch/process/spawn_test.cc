#include "lockstep/launch/process/spawn.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "lockstep/base/fd.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::process {
namespace {

struct ShellResult {
  int code = -1;
  std::string out;
};

/// Runs `script` in a shell that is started as `spec` says, and returns its exit code and its stdout.
ShellResult run_shell(const std::string& script, ChildSpec spec = {}) {
  base::Pipe out = base::make_pipe();
  spec.path = "/bin/sh";
  spec.argv = {"sh", "-c", script};
  spec.out = out.write.get();
  const pid_t pid = spawn(spec);
  out.write.reset();
  ShellResult result;
  char bytes[4096];
  for (ssize_t size = 0; (size = ::read(out.read.get(), bytes, sizeof bytes)) > 0;)
    result.out.append(bytes, static_cast<std::size_t>(size));
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  if (WIFEXITED(status)) result.code = WEXITSTATUS(status);
  return result;
}

TEST(Spawn, ChildHasWhatItsSpecSays) {
  const tests::TempDir folder;
  const ShellResult result =
      run_shell("pwd; echo $COLOUR; ulimit -n; exit 7",
                {.environment = {"COLOUR=green", "PATH=/usr/bin:/bin"}, .directory = folder.path(), .max_files = 99});
  EXPECT_EQ(result.code, 7);
  EXPECT_EQ(result.out, std::string(folder.path()) + "\ngreen\n99\n");
}

TEST(Spawn, ChildLeadsASession) {
  const ShellResult result = run_shell(
      "read -r pid name state parent group session rest < /proc/$$/stat; [ $pid = $group ] && [ $pid = $session ]");
  EXPECT_EQ(result.code, 0);
}

TEST(Spawn, OnlyNamedDescriptorsAreInherited) {
  const base::Fd named(::open("/dev/null", O_RDONLY | O_CLOEXEC)), other(::open("/dev/null", O_RDONLY));
  const auto is_open = [](int fd) { return "[ -e /proc/$$/fd/" + std::to_string(fd) + " ]"; };
  const ChildSpec spec{.inherited = named.get()};
  EXPECT_EQ(run_shell(is_open(named.get()), spec).code, 0);
  EXPECT_EQ(run_shell(is_open(other.get()), spec).code, 1);
}

TEST(Spawn, SignalsHaveTheirDefaults) {
  struct sigaction ignore{}, before{};
  ignore.sa_handler = SIG_IGN;
  ASSERT_EQ(::sigaction(SIGUSR1, &ignore, &before), 0);
  const ShellResult result = run_shell("kill -USR1 $$; exit 3");
  ::sigaction(SIGUSR1, &before, nullptr);
  EXPECT_EQ(result.code, -1);  // killed by the signal
}

StartFailure failure_of(ChildSpec spec) {
  base::Pipe pipe = base::make_pipe();
  spec.failure = pipe.write.get();
  spec.id = 5;
  const pid_t pid = spawn(spec);
  pipe.write.reset();
  StartFailure failure;
  EXPECT_EQ(::read(pipe.read.get(), &failure, sizeof failure), static_cast<ssize_t>(sizeof failure));
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 127);
  return failure;
}

TEST(Spawn, FailuresAreReported) {
  const StartFailure exec = failure_of({.path = "/nowhere/program", .argv = {"program"}});
  EXPECT_EQ(exec.id, 5);
  EXPECT_EQ(exec.step, StartStep::kExec);
  EXPECT_EQ(exec.error, ENOENT);
  const StartFailure bind = failure_of({.path = "/bin/true", .argv = {"true"}, .cpus = {8191}});
  EXPECT_EQ(bind.step, StartStep::kBind);
  EXPECT_EQ(bind.error, EINVAL);
}

TEST(ExecProgram, ReturnsErrno) { EXPECT_EQ(exec_program("/nowhere/program", {"program"}), ENOENT); }

}  // namespace
}  // namespace lockstep::launcher::process
