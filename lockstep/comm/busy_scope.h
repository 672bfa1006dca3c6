// BusyScope: reports that a rank makes progress while it does long work of its own.
#pragma once

#include <string>

namespace lockstep::comm {

/// While it lives, this rank counts as making progress, whatever it does, so no wait of another rank times out because
/// of it. Made by Group::busy(). Any thread may create or destroy it. Scopes may nest or overlap; status reports name
/// the most recent one that is still alive.
class BusyScope {
 public:
  explicit BusyScope(const std::string& what);
  ~BusyScope();
  BusyScope(const BusyScope&) = delete;
  BusyScope& operator=(const BusyScope&) = delete;
};

}  // namespace lockstep::comm
