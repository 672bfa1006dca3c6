#include "lockstep/base/error.h"
#include "lockstep/comm/gloo/gloo.h"

namespace lockstep::comm {

std::string gloo_missing() {
  return "this build has no gloo: its headers were missing (Debian's package libgloo-dev brings them)";
}

std::shared_ptr<Transport> make_gloo_transport(const GlooOptions&) { throw base::UsageError(gloo_missing()); }

}  // namespace lockstep::comm
