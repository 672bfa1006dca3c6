// Long work on one rank, announced, so that those who wait for it know.
#pragma once

#include <string>

namespace lockstep::comm {

/// While it lives, this rank gets on, whatever it does: no limit on waiting for others ends the job because of it. Made
/// by Group::busy(); any thread may end it. Nested ones count; of those that go on the one that began last is shown.
class Busy {
 public:
  explicit Busy(const std::string& what);
  ~Busy();
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
};

}  // namespace lockstep::comm
