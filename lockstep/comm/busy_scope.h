// Long work on one rank, announced, so that those who wait for it know.
#pragma once

#include <string>

namespace lockstep::comm {

/// While it lives, this rank gets on, whatever it does: no limit on waiting for others ends the job because of it. Made
/// by Group::busy(); any thread may end it. Nested ones count; of those that go on the one that began last is shown.
class BusyScope {
 public:
  explicit BusyScope(const std::string& what);
  ~BusyScope();
  BusyScope(const BusyScope&) = delete;
  BusyScope& operator=(const BusyScope&) = delete;
};

}  // namespace lockstep::comm
