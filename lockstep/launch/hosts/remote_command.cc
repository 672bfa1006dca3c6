#include "lockstep/launch/hosts/remote_command.h"

#include <algorithm>
#include <cctype>

#include "lockstep/base/parse.h"

namespace lockstep::launcher {
namespace {

constexpr int kSshFailed = 255;
constexpr int kNotExecutable = 126;  // a shell's codes
constexpr int kNotFound = 127;

/// What ssh or the loader say, and what it means; the first that fits.
struct SshErrorMeaning {
  const char* words;
  const char* meaning;
  const char* hint;
};
constexpr SshErrorMeaning kMeanings[] = {
    {"Could not resolve hostname", "unknown host", "is it in DNS, /etc/hosts or ~/.ssh/config?"},
    {"Connection refused", "refused: nobody listens there",
     "is sshd running there, on this port? port= in a host file names another"},
    {"Host key verification failed", "its host key is not known, or is another than before",
     "connect once by hand, ssh HOST, and look at the key"},
    {"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is another than before",
     "find out why before you remove the old one"},
    {"Permission denied", "the key was not accepted", "ssh-copy-id HOST; a key with a passphrase needs ssh-agent"},
    {"Too many authentication failures", "the key was not accepted",
     "name the right one in ~/.ssh/config (IdentityFile, IdentitiesOnly)"},
    {"timed out", "no answer", "is the host up, and does a firewall let port 22 through?"},
    {"No route to host", "no route to it", "is the host up, and on a network that this one reaches?"},
    {"Network is unreachable", "no route to it", "is this host's network up?"},
    {"Invalid node name", "SLURM does not know it", "sinfo -N shows the names"},
    {"Requested nodes are busy", "SLURM gives no step there now",
     "is another step of this job running there without --overlap?"},
    {"Unable to create step", "SLURM gives no step there",
     "scontrol show job $SLURM_JOB_ID tells the state of the job"},
    {"execve(): ", "there is no such program",
     "install lockstep there at the same path, or name its path with --remote-path"},
    {"No space left on device", "there is no room for what is to be shipped",
     "--ship copies to ${XDG_CACHE_HOME:-$HOME/.cache}/lockstep there"},
    {"error while loading shared libraries", "a library is missing there",
     "install lockstep there as it was installed here"},
};

}  // namespace

Environment srun_environment(Environment environment) {
  std::erase_if(environment, [](const std::string& variable) {
    const std::string name = variable.substr(0, variable.find('='));
    return name == "SLURM_LABELIO" || name == "SLURM_STDINMODE" || name == "SLURM_STDOUTMODE" ||
           name == "SLURM_STDERRMODE" || name == "SLURM_UNBUFFEREDIO";
  });
  return environment;
}

std::vector<std::string> agent_arguments(const Host& host, const std::string& slurm_step) {
  std::vector<std::string> words = {"agent", "--guarded"};
  if (host.step && !slurm_step.empty()) words.insert(words.end(), {"--attended", slurm_step});
  return words;
}

std::vector<std::string> ssh_command(const Host& host, std::chrono::seconds connect_timeout,
                                     const std::string& script) {
  const std::string& path = host.remote_path;
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("/._-+@,").find(c) != std::string_view::npos;
  };
  if (script.empty() && (path.empty() || path[0] == '-' || !std::all_of(path.begin(), path.end(), plain)))
    throw base::UsageError("the path of lockstep is " + base::quoted(path, 256) +
                               "; on other hosts allowed are letters, digits and any of / . _ - + @ ,",
                           "--remote-path names another");
  std::vector<std::string> words = {"ssh", "-T",
                                    "-o",  "BatchMode=yes",
                                    "-o",  "ConnectTimeout=" + std::to_string(connect_timeout.count()),
                                    "-o",  "ServerAliveInterval=2",
                                    "-o",  "ServerAliveCountMax=3",
                                    "-o",  "ForwardX11=no",
                                    "-o",  "ClearAllForwardings=yes",
                                    "-o",  "EscapeChar=none",
                                    "-o",  "LogLevel=ERROR"};
  if (host.port != 0) words.insert(words.end(), {"-p", std::to_string(host.port)});
  words.insert(words.end(), {"--", ssh_destination(host),
                             script.empty() ? "exec " + path + " agent --guarded" : "exec sh -c '" + script + "'"});
  return words;
}

std::vector<std::string> srun_command(const Host& host, const std::vector<std::string>& agent,
                                      const std::string& script) {
  // --mem=0 is all that the job has there; --overlap takes no part of it from others; what the job says of its own
  // steps is not meant for this one.
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

base::UsageError agent_start_error(const Host& host, int code, const std::string& text) {
  const std::string name = "host " + base::quoted(host.name, 253) + ": ";
  if (code == kNotFound && text.find("shared librar") == std::string::npos)
    return base::UsageError(name + "there is no program " + base::quoted(host.remote_path, 256),
                            "install lockstep there at the same path, or name its path with --remote-path");
  if (code == kNotExecutable)
    return base::UsageError(name + base::quoted(host.remote_path, 256) + " cannot be executed there",
                            "was it built for that machine?");
  for (const SshErrorMeaning& one : kMeanings)
    if (text.find(one.words) != std::string::npos)
      return base::UsageError(name + one.meaning + ": " + base::quoted(text, 512), one.hint);
  return base::UsageError(
      name + (code == kSshFailed && !host.step ? "ssh failed" : "the agent ended with code " + std::to_string(code)) +
      ": " + base::quoted(text, 512));
}

}  // namespace lockstep::launcher
