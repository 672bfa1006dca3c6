#include "lockstep/launch/protocol/rank_exit.h"

#include <string.h>

namespace lockstep::launcher {

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

std::string to_text(const RankExit& end) {
  return end.signal != 0 ? "killed by " + signal_name(end.signal) : "exited with code " + std::to_string(end.code);
}

}  // namespace lockstep::launcher
