// The job and the deadline that tests of stores use.
#pragma once

#include <chrono>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/job/job_key.h"

namespace lockstep::job {

inline const Credentials kTestJob{"job", 0, JobKey(std::string(32, 'k'))};
inline base::Deadline within_10s() { return base::Deadline::in(std::chrono::seconds(10)); }

}  // namespace lockstep::job
