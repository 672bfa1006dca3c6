#include <torch/nn/module.h>

#include "bench/ranks/c10d_baselines.h"
#include "lockstep/base/error.h"

namespace lockstep::bench {
namespace {

[[noreturn]] void missing() {
  throw base::UsageError("lockstep-bench rank: this build lacks Gloo's headers, which the c10d baselines require",
                         "Install libgloo-dev and build again");
}

}  // namespace

struct GlooBaseline::Impl {};
GlooBaseline::GlooBaseline() { missing(); }
GlooBaseline::~GlooBaseline() = default;
void GlooBaseline::all_reduce(std::vector<at::Tensor>&) { missing(); }
void GlooBaseline::barrier() { missing(); }

struct ReducerBaseline::Impl {};
ReducerBaseline::ReducerBaseline(torch::nn::Module&, bool) { missing(); }
ReducerBaseline::~ReducerBaseline() = default;
void ReducerBaseline::before_forward() { missing(); }
void ReducerBaseline::before_backward(const at::Tensor&) { missing(); }

}  // namespace lockstep::bench
