#include "lockstep/comm/world.h"

#include <exception>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/gloo/gloo.h"
#include "lockstep/comm/self/self.h"

namespace lockstep::comm {

World::~World() {
  if (watch && std::uncaught_exceptions() == 0) watch->leave();
}

const std::vector<std::string>& transport_names() {
  static const std::vector<std::string> names = {"auto", "self", "gloo"};
  return names;
}

std::string choose_transport(World& world, const std::string& asked) {
  const int size = world.identity.world_size;
  if (asked == "auto") {
    world.transport = size == 1 ? "self" : "gloo";
    if (size > 1 && !gloo_missing().empty()) throw base::UsageError("no transport for " + std::to_string(size) + " ranks: " + gloo_missing());
    return size == 1 ? "a world of one" : "the only one for several ranks in this build";
  }
  if (asked == "self") {
    if (size > 1)
      throw base::UsageError("transport self is for a world of one, but there are " + std::to_string(size) +
                             " ranks; allowed here are auto and gloo");
  } else if (asked == "gloo") {
    if (!gloo_missing().empty()) throw base::UsageError("transport gloo: " + gloo_missing());
  } else {
    std::string names;
    for (const std::string& one : transport_names()) names += (names.empty() ? "" : ", ") + one;
    throw base::UsageError("transport is " + base::quoted(asked, 80) + "; allowed are " + names);
  }
  world.transport = asked;
  return "asked for by name";
}

std::shared_ptr<Transport> World::make_transport(const std::string& name, const std::vector<int>& members) const {
  if (transport == "self" || members.size() == 1) return make_self_transport();
  int place = 0;
  while (members[static_cast<std::size_t>(place)] != identity.rank) ++place;
  return make_gloo_transport({.store = std::make_shared<job::PrefixStore>("gloo/" + name, store),
                              .rank = place,
                              .size = static_cast<int>(members.size()),
                              .address = address,
                              .interface = interface,
                              .timeout = timeout});
}

}  // namespace lockstep::comm
