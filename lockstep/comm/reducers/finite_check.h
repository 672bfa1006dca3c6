// Gradients that are not finite are refused before anybody gets them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/interface/gradient_reducer.h"

namespace lockstep::comm {

/// `inner`, each of whose gradients is looked at when it is ready, in one pass (least and greatest, which a NaN passes
/// through). One that is not finite goes to `fail`, which throws, as a CommError kNonFinite of `rank` with the part's
/// name.
std::unique_ptr<GradientReducer> with_finite_check(std::unique_ptr<GradientReducer> inner,
                                                   std::vector<std::string> names, int rank,
                                                   std::function<void(const base::CommError&)> fail);

}  // namespace lockstep::comm
