#include "lockstep/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace lockstep::base {

void check_failed(const char* file, int line, const std::string& text) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, text.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace lockstep::base
