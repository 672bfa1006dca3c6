// A rank without torch that joins the other ranks, prints the time when all have joined, and exits. Started by
// launch_time.py.
#include <chrono>
#include <cstdio>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/job/identity/identity.h"
#include "lockstep/job/join.h"
#include "lockstep/job/store_client.h"

using namespace lockstep;

int main() {
  try {
    const base::Deadline deadline = base::Deadline::in(std::chrono::seconds(60));
    job::identity::Identity identity = job::identity::identify(base::Env::this_process());
    const auto store = job::connect_store(
        identity.address, {identity.job, identity.generation, job::JobKey::inherited()}, identity.rank, deadline);
    job::join(*store, identity, {}, deadline);
    if (identity.rank == 0)
      std::printf("%lld\n", static_cast<long long>(std::chrono::steady_clock::now().time_since_epoch().count()));
    return 0;
  } catch (const base::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
