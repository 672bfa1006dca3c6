#include "lockstep/launch/plan/host_info.h"

#include <filesystem>
#include <string_view>
#include <system_error>

#include "lockstep/base/env.h"
#include "lockstep/base/net/socket.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/join.h"

namespace lockstep::launcher::plan {
namespace {

int count_gpus() {
  int count = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename();
    if (name.rfind("nvidia", 0) == 0 && base::parse_int(std::string_view(name).substr(6))) ++count;
  }
  return count;
}

}  // namespace

HostInfo collect_host_info() {
  return {.host = base::net::host_name(),
          .version = LOCKSTEP_VERSION,
          .build = job::build_id(""),
          .machine = job::host_id(),
          .cpus = usable_cpus(),
          .gpus = count_gpus(),
          .visible_gpus = base::Env::this_process().cuda_visible_devices.value_or("")};
}

}  // namespace lockstep::launcher::plan
