#include "lockstep/launch/agent/oom_kills.h"

#include <fstream>
#include <sstream>
#include <string>

#include "lockstep/base/parse.h"

namespace lockstep::launcher::agent {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

std::int64_t parse_oom_kills(std::string_view text) {
  constexpr std::string_view kName = "oom_kill ";
  for (const std::string& line : base::split(text, '\n'))
    if (line.rfind(kName, 0) == 0) return base::parse_int(std::string_view(line).substr(kName.size())).value_or(0);
  return 0;
}

std::int64_t count_oom_kills() {
  // Lines of /proc/self/cgroup: "4:memory:/path" (v1), "0::/path" (v2).
  for (const std::string& line : base::split(read_file("/proc/self/cgroup"), '\n')) {
    const std::size_t path = line.find(":/");
    if (path == std::string::npos) continue;
    const std::string folder = line.substr(path + 1);
    std::string text;
    if (line.find(":memory:") != std::string::npos)
      text = read_file("/sys/fs/cgroup/memory" + folder + "/memory.oom_control");
    else if (line.rfind("0::", 0) == 0)
      text = read_file("/sys/fs/cgroup" + folder + "/memory.events");
    if (text.find("oom_kill ") != std::string::npos) return parse_oom_kills(text);
  }
  return parse_oom_kills(read_file("/proc/vmstat"));
}

}  // namespace lockstep::launcher::agent
