#include "lockstep/launch/hosts/remote_command.h"

#include <cstdio>

#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/timeouts.h"

namespace lockstep::launcher::hosts {
namespace {

constexpr int kSshFailed = 255;
constexpr int kNotExecutable = 126;  // this and the next: exit codes of a shell
constexpr int kNotFound = 127;

/// Texts in error messages of ssh, SLURM and the loader, with their meaning. The first match applies.
struct SshErrorMeaning {
  const char* text;
  const char* meaning;
  const char* hint;
};
constexpr SshErrorMeaning kMeanings[] = {
    {"Could not resolve hostname", "unknown host", "add it to DNS, /etc/hosts or ~/.ssh/config"},
    {"Connection refused", "connection refused",
     "check that sshd listens there on this port; port= in a host file selects another one"},
    {"Host key verification failed", "its host key is unknown or has changed",
     "connect once by hand with ssh HOST and verify the key"},
    {"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key has changed",
     "find out why before you remove the old key"},
    {"Permission denied", "the key was rejected", "run ssh-copy-id HOST; a key with a passphrase needs ssh-agent"},
    {"Too many authentication failures", "the key was rejected",
     "name the right key in ~/.ssh/config (IdentityFile, IdentitiesOnly)"},
    {"timed out", "no answer", "check that the host is up and that no firewall blocks port 22"},
    {"No route to host", "no route to the host", "check that the host is up and on a network that this host can reach"},
    {"Network is unreachable", "no route to the host", "check that this host's network is up"},
    {"Invalid node name", "unknown to SLURM", "sinfo -N lists the names"},
    {"Requested nodes are busy", "SLURM cannot start a step there now",
     "check whether another step of this job runs there without --overlap"},
    {"Unable to create step", "SLURM cannot start a step there",
     "scontrol show job $SLURM_JOB_ID shows the state of the job"},
    {"execve(): ", "there is no such program",
     "install lockstep there at the same path, or name its path with --remote-path"},
    {"No space left on device", "no space left for the files that --ship copies",
     "free some space in ${XDG_CACHE_HOME:-$HOME/.cache}/lockstep there"},
    {"error while loading shared libraries", "a shared library is missing there",
     "install lockstep there in the same way as here"},
};

}  // namespace

process::Environment srun_environment(process::Environment environment) {
  std::erase_if(environment, [](const std::string& variable) {
    const std::string_view name = process::variable_name(variable);
    return name == "SLURM_LABELIO" || name == "SLURM_STDINMODE" || name == "SLURM_STDOUTMODE" ||
           name == "SLURM_STDERRMODE" || name == "SLURM_UNBUFFEREDIO";
  });
  return environment;
}

std::vector<std::string> agent_arguments(const cli::HostSpec& host, const std::string& slurm_step) {
  std::vector<std::string> words = {"agent", "--guarded"};
  if (host.is_slurm && !slurm_step.empty()) words.insert(words.end(), {"--slurm-step", slurm_step});
  return words;
}

bool has_session_options(const std::string& version) {
  int major = 0, minor = 0;
  return std::sscanf(version.c_str(), "OpenSSH_%d.%d", &major, &minor) == 2 &&
         (major > 8 || (major == 8 && minor >= 7));
}

std::vector<std::string> ssh_command(const cli::HostSpec& host, std::chrono::seconds connect_timeout,
                                     const std::string& script, bool with_session_options) {
  const std::string& path = host.remote_path;
  if (script.empty() && (path.empty() || path[0] == '-' || !base::is_alnum_or(path, "/._-+@,")))
    throw base::UsageError("the path of lockstep is " + base::quoted(path, 256) +
                               "; for other hosts expected letters, digits and any of / . _ - + @ ,",
                           "set another path with --remote-path");
  const auto alive_count = (2 * base::net::host_timeout() + base::kSshAliveInterval) / base::kSshAliveInterval;
  std::vector<std::string> words = {"ssh", "-T",
                                    "-o",  "BatchMode=yes",
                                    "-o",  "ConnectTimeout=" + std::to_string(connect_timeout.count()),
                                    "-o",  "ServerAliveInterval=" + std::to_string(base::kSshAliveInterval.count()),
                                    "-o",  "ServerAliveCountMax=" + std::to_string(alive_count),
                                    "-o",  "RemoteCommand=none",
                                    "-o",  "PermitLocalCommand=no",
                                    "-o",  "ForwardX11=no",
                                    "-o",  "ClearAllForwardings=yes",
                                    "-o",  "EscapeChar=none",
                                    "-o",  "LogLevel=ERROR"};
  if (with_session_options) words.insert(words.end(), {"-o", "SessionType=default", "-o", "StdinNull=no"});
  if (host.port != 0) words.insert(words.end(), {"-p", std::to_string(host.port)});
  words.insert(words.end(), {"--", cli::ssh_destination(host),
                             script.empty() ? "exec " + path + " agent --guarded" : "exec sh -c '" + script + "'"});
  return words;
}

std::vector<std::string> srun_command(const cli::HostSpec& host, const std::vector<std::string>& agent,
                                      const std::string& script) {
  // --mem=0 gives the step all of the job's memory on the host, and --overlap takes no resources from other steps. The
  // other options override what the job sets for its own steps.
  std::vector<std::string> words = {
      "srun",    "--nodes=1",           "--ntasks=1", "--ntasks-per-node=1", "--nodelist=" + host.name, "--overlap",
      "--mem=0", "--cpu-bind=none",     "--mpi=none", "--input=0",           "--kill-on-bad-exit=0",    "--wait=0",
      "--quiet", "--job-name=lockstep", "--"};
  if (!script.empty()) {
    words.insert(words.end(), {"sh", "-c", script});
    return words;
  }
  words.push_back(host.remote_path);
  words.insert(words.end(), agent.begin(), agent.end());
  return words;
}

base::UsageError agent_start_error(const cli::HostSpec& host, int code, const std::string& text) {
  const std::string name = "host " + base::quoted(host.name, 253) + ": ";
  if (code == kNotFound && text.find("shared librar") == std::string::npos)
    return base::UsageError(name + "there is no program " + base::quoted(host.remote_path, 256),
                            "install lockstep there at the same path, or name its path with --remote-path");
  if (code == kNotExecutable)
    return base::UsageError(name + base::quoted(host.remote_path, 256) + " cannot be executed there",
                            "check that it was built for that machine");
  for (const SshErrorMeaning& row : kMeanings)
    if (text.find(row.text) != std::string::npos)
      return base::UsageError(name + row.meaning + ": " + base::quoted(text, 512), row.hint);
  return base::UsageError(
      name +
      (code == kSshFailed && !host.is_slurm ? "ssh failed" : "the agent exited with code " + std::to_string(code)) +
      ": " + base::quoted(text, 512));
}

}  // namespace lockstep::launcher::hosts
