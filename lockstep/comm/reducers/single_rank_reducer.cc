#include "lockstep/comm/reducers/single_rank_reducer.h"

namespace lockstep::comm::reducers {

Participation SingleRankReducer::finish(GradientSink& sink) {
  if (joined_) return {};
  for (std::size_t i = 0; i < gradients_.size(); ++i)
    if (gradients_[i].fresh) sink.consume(i, gradients_[i].tensor);
  gradients_.assign(specs_.size(), {});
  ++stats_.reductions;
  return {.active = 1};
}

}  // namespace lockstep::comm::reducers
