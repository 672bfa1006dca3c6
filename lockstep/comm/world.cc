#include "lockstep/comm/world.h"

#include <algorithm>
#include <exception>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/comm/gloo/gloo.h"
#include "lockstep/comm/self/self.h"
#include "lockstep/comm/shm/shm.h"

namespace lockstep::comm {

World::~World() {
  if (watch && std::uncaught_exceptions() == 0) watch->leave();
}

const std::vector<std::string>& transport_names() {
  static const std::vector<std::string> names = {"auto", "self", "shm", "gloo"};
  return names;
}

void check_transport(const std::string& asked, int size) {
  const auto& names = transport_names();
  if (std::find(names.begin(), names.end(), asked) == names.end()) {
    std::string list;
    for (const std::string& one : names) list += (list.empty() ? "" : ", ") + one;
    throw base::UsageError("transport is " + base::quoted(asked, 80) + "; allowed are " + list);
  }
  if (asked == "self" && size > 1)
    throw base::UsageError("transport self is for a world of one, but there are " + std::to_string(size) +
                           " ranks; allowed here are auto, shm and gloo");
  if (asked == "gloo" && !gloo_missing().empty()) throw base::UsageError("transport gloo: " + gloo_missing());
}

std::string choose_transport(World& world, const std::string& asked) {
  const int size = world.identity.world_size;
  const bool one_host = static_cast<int>(world.identity.neighbours.size()) == size;
  if (asked == "shm" && !one_host)
    throw base::UsageError("transport shm is for ranks of one host, but there are " + std::to_string(world.identity.num_nodes) +
                           " hosts; allowed here are auto and gloo");
  world.transport = asked;
  if (asked != "auto") return "asked for by name";
  world.transport = size == 1 ? "self" : one_host ? "shm" : "gloo";
  if (world.transport == "gloo" && !gloo_missing().empty())
    throw base::UsageError("no transport for ranks of several hosts: " + gloo_missing());
  return size == 1 ? "a world of one" : one_host ? "all ranks share a host" : "ranks of several hosts";
}

void prepare_transport(World& world, base::Deadline deadline) {
  if (world.transport == "shm") world.neighbours = Neighbours::meet(*world.store, world.identity.neighbours, world.identity.rank, deadline);
}

std::shared_ptr<Transport> World::make_transport(const std::string& name, const std::vector<int>& members) const {
  if (transport == "self" || members.size() == 1) return make_self_transport();
  int place = 0;
  while (members[static_cast<std::size_t>(place)] != identity.rank) ++place;
  if (transport == "shm")
    return make_shm_transport({.neighbours = neighbours,
                               .store = std::make_shared<job::PrefixStore>("shm/" + name, store),
                               .members = members,
                               .rank = place,
                               .timeout = timeout});
  return make_gloo_transport({.store = std::make_shared<job::PrefixStore>("gloo/" + name, store),
                              .rank = place,
                              .size = static_cast<int>(members.size()),
                              .address = address,
                              .interface = interface,
                              .timeout = timeout});
}

}  // namespace lockstep::comm
