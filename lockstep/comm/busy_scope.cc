#include "lockstep/comm/busy_scope.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::comm {
namespace {

/// What is going on, in the order in which it began. Lives as long as the process.
struct Works {
  std::mutex mutex;  // guards all, and the name in the page
  std::vector<std::pair<const Busy*, std::string>> all;

  void show_last() const {
    base::RankPage& page = base::RankPage::process();
    const std::string what = all.empty() ? "" : all.back().second;
    const std::size_t size = std::min(what.size(), sizeof page.busy_with - 1);
    std::memcpy(page.busy_with, what.data(), size);
    page.busy_with[size] = 0;
    page.alive.fetch_add(1);
  }
};

Works& works() {
  static auto* one = new Works;
  return *one;
}

}  // namespace

Busy::Busy(const std::string& what) {
  const std::lock_guard lock(works().mutex);
  works().all.emplace_back(this, what);
  works().show_last();
  base::RankPage::process().busy.fetch_add(1);
}

Busy::~Busy() {
  const std::lock_guard lock(works().mutex);
  std::erase_if(works().all, [this](const auto& one) { return one.first == this; });
  works().show_last();
  base::RankPage::process().busy.fetch_sub(1);
}

}  // namespace lockstep::comm
