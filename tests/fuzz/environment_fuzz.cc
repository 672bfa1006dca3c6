// Fuzzes the parsers of environment variables, one variable per line, of SLURM's lists, of FATAL lines, and of the
// values that ranks publish in the store.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/job/fatal.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/job/identity/node_list.h"
#include "lockstep/job/identity/pmi.h"
#include "lockstep/job/join.h"
#include "lockstep/job/local_store.h"

using namespace lockstep;

namespace {

void expand(const std::string& text) {
  try {
    const auto hosts = job::identity::expand_hosts("LIST", text);
    if (hosts.empty() || hosts.size() > job::identity::kMaxNodes) std::abort();
    for (const std::string& host : hosts)
      if (host.empty() || host.size() > 255 || host[0] == '-' || host.find_first_of(",[] \n") != std::string::npos)
        std::abort();
  } catch (const base::UsageError&) {
  }
  try {
    if (const auto counts = job::identity::expand_counts("COUNTS", text);
        counts.empty() || counts.size() > job::identity::kMaxNodes)
      std::abort();
  } catch (const base::UsageError&) {
  }
  if (job::identity::pmi_field(text, "value").size() > text.size()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::map<std::string, std::string> variables;
  for (const std::string& line : base::split(text, '\n'))
    if (const std::size_t equals = line.find('='); equals != std::string::npos)
      variables[line.substr(0, equals)] = line.substr(equals + 1);
  const base::Env env = base::Env([&](const char* name) -> base::Env::Value {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : base::Env::Value(found->second);
  });
  try {
    const job::identity::Identity id = job::identity::identify(env);
    if (id.rank < 0 || id.rank >= id.world_size) std::abort();
  } catch (const base::UsageError&) {
  }
  expand(text);
  // A FATAL line that parses must survive a round trip.
  if (const auto fatal = job::parse_fatal(text)) {
    const auto again = job::parse_fatal(job::format_fatal(*fatal));
    if (!again || again->cause != fatal->cause || again->rank != fatal->rank) std::abort();
  }
  // The record that another rank has published.
  job::LocalStore store;
  if (text.size() > job::kMaxValueBytes) return 0;
  store.set("join/0", text, base::Deadline::in(std::chrono::seconds(1)));
  job::find_host_of_rank(store, 0);
  return 0;
}
