// Fuzzes the values of -H and --interface, and host files. Checks that every error names its position, and that ssh
// gets every accepted host as a single word that is not an option.
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/launch/cli/host_list.h"
#include "lockstep/launch/cli/interface_filter.h"
#include "lockstep/launch/hosts/remote_command.h"

using namespace lockstep;

namespace {

/// Aborts unless `message` starts with "NAME:LINE:COLUMN: ".
void check_error_location(const std::string& message, const std::string& name) {
  std::size_t at = name.size();
  if (message.compare(0, at, name) != 0) std::abort();
  for (int i = 0; i < 2; ++i) {
    if (message[at++] != ':' || !std::isdigit(static_cast<unsigned char>(message[at]))) std::abort();
    while (std::isdigit(static_cast<unsigned char>(message[at]))) ++at;
  }
  if (message.compare(at, 2, ": ") != 0) std::abort();
}

/// Aborts if user input becomes an option of ssh, or a second word for the shell on the other host.
void check_ssh_words(const std::vector<launcher::cli::HostSpec>& hosts) {
  if (hosts.empty()) std::abort();
  for (launcher::cli::HostSpec host : hosts) {
    if (host.remote_path.empty()) host.remote_path = "/usr/bin/lockstep";
    const std::vector<std::string> words = launcher::hosts::ssh_command(host, std::chrono::seconds(1));
    const std::string &destination = words[words.size() - 2], &command = words.back();
    if (words[words.size() - 3] != "--" || destination.empty() || destination[0] == '-') std::abort();
    if (destination.find_first_of(" \t\n;&|$`'\"\\<>(){}*?!#~") != std::string::npos ||
        command.find_first_of(";&|$`'\"\\<>(){}*?!#~\n\t") != std::string::npos)
      std::abort();
    if (host.slots < 0 || host.slots > 4096 || host.port < 0 || host.port > 65535) std::abort();
    launcher::hosts::agent_start_error(host, 255, destination);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    check_ssh_words(launcher::cli::parse_host_list(text));
  } catch (const base::UsageError& error) {
    check_error_location(error.what(), "-H");
  }
  try {
    check_ssh_words(launcher::cli::parse_host_file("hosts", text));
  } catch (const base::FormatError& error) {
    check_error_location(error.what(), "hosts");
  }
  try {
    const launcher::cli::InterfaceFilter choice = launcher::cli::parse_interface_filter("--interface", text);
    launcher::cli::allows(choice, "eth0", "10.0.0.1");
    launcher::cli::allows(choice, "eth0", "fe80::1%eth0");
  } catch (const base::UsageError&) {
  }
  return 0;
}
