#include "lockstep/comm/arena/quarantine.h"

#include <mutex>
#include <vector>

namespace lockstep::comm {

void keep_for_ever(at::Tensor tensor) {
  static std::mutex mutex;  // guards kept
  static auto* kept = new std::vector<at::Tensor>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(tensor));
}

}  // namespace lockstep::comm
