// Environments of processes, for tests of their identity.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "lockstep/base/env.h"

namespace lockstep::tests {

using Variables = std::map<std::string, std::string>;

inline base::Env environment(const Variables& variables) {
  return base::Env([&](const char* name) -> base::Env::Value {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : base::Env::Value(found->second);
  });
}

/// The variables of both; of `a` where both have one.
inline Variables both(Variables a, const Variables& b) {
  a.insert(b.begin(), b.end());
  return a;
}

}  // namespace lockstep::tests
