#include "lockstep/base/error.h"
#include "lockstep/comm/gloo/gloo.h"

namespace lockstep::comm {

std::string gloo_unavailable_reason() {
  return "this build has no gloo: its headers were missing (Debian's package libgloo-dev brings them)";
}

std::shared_ptr<Transport> make_gloo_transport(const GlooOptions&) {
  throw base::UsageError(gloo_unavailable_reason());
}

}  // namespace lockstep::comm
