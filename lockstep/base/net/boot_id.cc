#include "lockstep/base/net/boot_id.h"

#include <fstream>

namespace lockstep::base::net {

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace lockstep::base::net
