// join(): keeps ranks that have no more batches in the reductions of the others.
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/ddp/ddp_impl.h"

namespace lockstep::ddp {
namespace {

constexpr auto kPollInterval = std::chrono::microseconds(200);

}  // namespace

std::optional<int> join(const std::vector<DistributedDataParallel*>& models, const std::function<void()>& loop,
                        const JoinOptions& options) {
  if (models.empty()) throw base::UsageError("join: the list of models is empty; expected one or more");
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
    // With several models, the other ranks' next reduction may be of any of them, so poll. With one model, blocking in
    // the reduction itself reports more about the other ranks if it fails.
    std::size_t next = 0;
    while (open.size() > 1 && !open[next]->can_finish_shadow_reduction()) {
      next = (next + 1) % open.size();
      if (next == 0)
        std::this_thread::sleep_for(
            kPollInterval);  // bounded: ranks that train start reductions, ranks that are done join
    }
    if (open[next]->finish_shadow_reduction())
      open[next]->begin_shadow_reduction(divide_by_active);
    else
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(next));
  }
  std::optional<int> root;
  for (auto* model : all)
    if (const auto rank = model->finish_join()) root = rank;
  for (torch::optim::Optimizer* optimizer : options.optimizers)
    if (root) broadcast_optimizer_state(*optimizer, all.front()->group(), *root);
  return root;
}

}  // namespace lockstep::ddp
