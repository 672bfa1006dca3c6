#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/ddp/ddp_impl.h"

namespace lockstep::ddp {
namespace {

constexpr auto kPollInterval = std::chrono::microseconds(200);

}  // namespace

void join(const std::vector<DistributedDataParallel*>& models, const std::function<void()>& loop,
          const JoinOptions& options) {
  if (models.empty()) throw base::UsageError("join: no model is named");
  std::vector<DistributedDataParallel::Impl*> open;
  for (DistributedDataParallel* model : models) open.push_back(model->impl_.get());
  const auto all = open;
  for (const auto* model : all) model->check_join_allowed();
  try {
    loop();
  } catch (const std::exception& error) {
    for (auto* model : all) model->abandon(std::string("the loop under join() failed: ") + error.what());
    throw;
  }
  const bool divide_by_active = !options.divide_by_initial_world_size;
  for (auto* model : open) model->begin_shadow_reduction(divide_by_active);
  while (!open.empty()) {
    // With several models the others' next exchange may be any of them; with one its own wait knows more about the
    // others.
    std::size_t next = 0;
    while (open.size() > 1 && !open[next]->can_finish_shadow_reduction()) {
      next = (next + 1) % open.size();
      if (next == 0)
        std::this_thread::sleep_for(kPollInterval);  // bounded: a rank that trains exchanges, one that ends joins
    }
    if (open[next]->finish_shadow_reduction())
      open[next]->begin_shadow_reduction(divide_by_active);
    else
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(next));
  }
  for (auto* model : all) model->finish_join();
}

}  // namespace lockstep::ddp
