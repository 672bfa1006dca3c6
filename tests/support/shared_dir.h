// A temporary directory that all ranks of a test share.
#pragma once

#include <optional>
#include <string>

#include "tests/support/rank_main.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests {

/// Rank 0 creates the directory, and removes it after all ranks have destroyed their object. Constructor and destructor
/// are collective.
class SharedDir {
 public:
  SharedDir() {
    if (world().rank() == 0) dir_.emplace();
    path_ = world().broadcast_bytes(dir_ ? dir_->path() : "", 0);
  }
  ~SharedDir() { world().barrier(); }
  const std::string& path() const { return path_; }

 private:
  std::optional<TempDir> dir_;
  std::string path_;
};

}  // namespace lockstep::tests
