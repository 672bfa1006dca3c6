#include "lockstep/launch/hosts/remote_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/temp_dir.h"

namespace lockstep::launcher::hosts {
namespace {

using namespace std::chrono_literals;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

cli::HostSpec host(const std::string& name, const std::string& path = "/opt/lockstep") {
  cli::HostSpec one;
  one.name = name;
  one.remote_path = path;
  return one;
}

TEST(RemoteCommand, SshIsNonInteractiveWithoutForwarding) {
  const auto words = ssh_command(host("alpha", "/opt/lockstep/bin/lockstep"), 7s);
  EXPECT_EQ(words.front(), "ssh");
  for (const char* word : {"BatchMode=yes", "ConnectTimeout=7", "ClearAllForwardings=yes", "RemoteCommand=none",
                           "PermitLocalCommand=no", "SessionType=default", "StdinNull=no", "-T"})
    EXPECT_THAT(words, Contains(word));
  EXPECT_THAT(ssh_command(host("alpha", "/lockstep"), 7s, "", false), Not(Contains("SessionType=default")));
  EXPECT_EQ(words[words.size() - 3], "--");
  EXPECT_EQ(words[words.size() - 2], "alpha");
  EXPECT_EQ(words.back(), "exec /opt/lockstep/bin/lockstep agent --guarded");
}

TEST(RemoteCommand, SessionOptionsExistSinceOpenSsh87) {
  for (const char* version : {"OpenSSH_9.2p1 Debian-2+deb12u3, OpenSSL 3.0", "OpenSSH_8.7p1", "OpenSSH_10.0p2"})
    EXPECT_TRUE(has_session_options(version)) << version;
  for (const char* version : {"OpenSSH_8.4p1 Debian-5", "OpenSSH_7.6", "", "Sun_SSH_1.1"})
    EXPECT_FALSE(has_session_options(version)) << version;
}

TEST(RemoteCommand, SshUsesUserPortAndPath) {
  cli::HostSpec one = host("fd00::2");
  one.user = "eve";
  one.port = 2222;
  one.remote_path = "bin/lockstep";
  const auto words = ssh_command(one, 7s);
  EXPECT_THAT(words, Contains("2222"));
  EXPECT_EQ(words[words.size() - 2], "eve@fd00::2");
  EXPECT_EQ(words.back(), "exec bin/lockstep agent --guarded");
}

TEST(RemoteCommand, PathsNeedingShellQuotingAreRejected) {
  for (const char* path : {"", "/a b", "/a;reboot", "/$HOME", "/a'b", "-x", "/a\nb", "~/lockstep"})
    EXPECT_THAT(tests::message_of<base::UsageError>([&] { ssh_command(host("alpha", path), 7s); }),
                HasSubstr("expected letters"))
        << path;
}

TEST(RemoteCommand, SrunStepOverlapsOtherSteps) {
  auto words = srun_command(host("n1", "/opt/lock step"), {"agent", "--guarded"});
  EXPECT_THAT(words, Contains("--nodelist=n1"));
  EXPECT_THAT(words, Contains("--overlap"));
  EXPECT_EQ(words[words.size() - 3], "/opt/lock step");  // not quoted: no shell reads it
  EXPECT_EQ(words.back(), "--guarded");
  cli::HostSpec step = host("n1");
  EXPECT_THAT(agent_arguments(step, "12.0"), ElementsAre("agent", "--guarded"));
  step.is_slurm = true;
  EXPECT_THAT(agent_arguments(step, "12.0"), ElementsAre("agent", "--guarded", "--slurm-step", "12.0"));
  EXPECT_THAT(agent_arguments(step, ""), ElementsAre("agent", "--guarded"));
}

TEST(RemoteCommand, SrunOutputVariablesAreNotInherited) {
  EXPECT_THAT(srun_environment({"SLURM_LABELIO=1", "SLURM_JOB_ID=5", "SLURM_UNBUFFEREDIO=1", "SLURM_STDOUTMODE=x"}),
              ElementsAre("SLURM_JOB_ID=5"));
}

TEST(RemoteCommand, ScriptReplacesTheAgent) {
  EXPECT_EQ(ssh_command(host("alpha", ""), 7s, "put it; exec it").back(), "exec sh -c 'put it; exec it'");
  const auto words = srun_command(host("n1", ""), {"agent"}, "put it; exec it");
  EXPECT_EQ(words.back(), "put it; exec it");
  EXPECT_EQ(words[words.size() - 2], "-c");
}

TEST(RemoteCommand, SrunErrorMessages) {
  cli::HostSpec one = host("n1");
  one.is_slurm = true;
  const auto error_of = [&](const std::string& text) { return std::string(agent_start_error(one, 1, text).what()); };
  EXPECT_THAT(error_of("slurmstepd: error: execve(): /opt/lockstep: No such file or directory"),
              HasSubstr("host \"n1\": there is no such program"));
  EXPECT_THAT(error_of("srun: error: Unable to create step for job 3: Invalid node name specified"),
              HasSubstr("unknown to SLURM"));
  EXPECT_THAT(error_of("srun: error: Unable to create step for job 3: Job/step already completing"),
              HasSubstr("SLURM cannot start a step there"));
  EXPECT_THAT(error_of("odd"), HasSubstr("the agent exited with code 1"));
}

TEST(RemoteCommand, SshErrorMessages) {
  const auto error_of = [](const std::string& text, int code = 255) {
    return std::string(agent_start_error(host("beta"), code, text).what());
  };
  EXPECT_THAT(error_of("ssh: Could not resolve hostname beta: Name or service not known"),
              HasSubstr("host \"beta\": unknown host"));
  EXPECT_THAT(error_of("ssh: connect to host beta port 22: Connection refused"), HasSubstr("connection refused"));
  EXPECT_THAT(error_of("her@beta: Permission denied (publickey)."), HasSubstr("the key was rejected"));
  EXPECT_THAT(error_of("Host key verification failed."), HasSubstr("its host key is unknown"));
  EXPECT_THAT(error_of("ssh: connect to host beta port 22: Connection timed out"), HasSubstr("no answer"));
  EXPECT_THAT(error_of("ssh: connect to host beta port 22: No route to host"), HasSubstr("no route to the host"));
  EXPECT_THAT(error_of("bash: line 1: /opt/lockstep: No such file or directory", 127),
              HasSubstr("there is no program \"/opt/lockstep\""));
  EXPECT_THAT(error_of("bash: line 1: /opt/lockstep: Permission denied", 126), HasSubstr("cannot be executed there"));
  EXPECT_THAT(
      error_of("/opt/lockstep: error while loading shared libraries: libsodium.so.23: cannot open shared object file",
               127),
      HasSubstr("a shared library is missing there"));
  EXPECT_THAT(error_of("something else"), HasSubstr("ssh failed: \"something else\""));
  EXPECT_THAT(error_of("odd", 3), HasSubstr("the agent exited with code 3"));
}

}  // namespace
}  // namespace lockstep::launcher::hosts
