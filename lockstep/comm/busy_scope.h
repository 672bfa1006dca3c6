// BusyScope: reports that a rank makes progress while it does long work of its own.
#pragma once

#include <string>

namespace lockstep::comm {

/// While a BusyScope exists, this rank counts as making progress, so no wait of another rank times out because of this
/// rank. Group::busy() makes one. Any thread may create or destroy it. Scopes may nest or overlap; status reports name
/// the most recent scope that still exists.
class BusyScope {
 public:
  explicit BusyScope(const std::string& what);
  ~BusyScope();
  BusyScope(const BusyScope&) = delete;
  BusyScope& operator=(const BusyScope&) = delete;
};

}  // namespace lockstep::comm
