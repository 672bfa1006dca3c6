#include "lockstep/comm/busy_scope.h"

#include <mutex>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::comm {
namespace {

/// The existing BusyScopes, in the order in which they were created. Never destroyed.
struct BusyStack {
  std::mutex mutex;  // guards `scopes` and the name in the page
  std::vector<std::pair<const BusyScope*, std::string>> scopes;

  void publish_last() const {
    base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
    base::telemetry::RankPage::BusyText what{};
    if (!scopes.empty()) base::telemetry::copy_text(what.text, scopes.back().second);
    page.busy_with.store(what);
    page.alive_count.fetch_add(1);
  }
};

BusyStack& busy_stack() {
  static auto* stack = new BusyStack;
  return *stack;
}

}  // namespace

BusyScope::BusyScope(const std::string& what) {
  const std::lock_guard lock(busy_stack().mutex);
  busy_stack().scopes.emplace_back(this, what);
  busy_stack().publish_last();
  base::telemetry::RankPage::this_process().busy_depth.fetch_add(1);
}

BusyScope::~BusyScope() {
  const std::lock_guard lock(busy_stack().mutex);
  std::erase_if(busy_stack().scopes, [this](const auto& scope) { return scope.first == this; });
  busy_stack().publish_last();
  base::telemetry::RankPage::this_process().busy_depth.fetch_sub(1);
}

}  // namespace lockstep::comm
