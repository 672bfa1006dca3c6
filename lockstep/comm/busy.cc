#include "lockstep/comm/busy.h"

#include <algorithm>
#include <cstring>

#include "lockstep/base/rank_page.h"

namespace lockstep::comm {

Busy::Busy(const std::string& what) {
  base::RankPage& page = base::RankPage::process();
  const std::size_t size = std::min(what.size(), sizeof page.busy_with - 1);
  std::memcpy(page.busy_with, what.data(), size);
  page.busy_with[size] = 0;
  page.busy.fetch_add(1);
  page.alive.fetch_add(1);
}

Busy::~Busy() {
  base::RankPage& page = base::RankPage::process();
  page.alive.fetch_add(1);
  page.busy.fetch_sub(1);
}

}  // namespace lockstep::comm
