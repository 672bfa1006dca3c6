// gloo.h for a build without Gloo.
#include "lockstep/base/error.h"
#include "lockstep/comm/gloo/gloo.h"

namespace lockstep::comm::gloo {

std::string gloo_unavailable_reason() {
  return "this build has no gloo, because its headers were missing (install the package libgloo-dev and build again)";
}

std::shared_ptr<Transport> make_gloo_transport(const GlooOptions&) {
  throw base::UsageError(gloo_unavailable_reason());
}

}  // namespace lockstep::comm::gloo
