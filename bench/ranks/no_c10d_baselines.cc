#include <torch/nn/module.h>

#include "bench/ranks/c10d_baselines.h"
#include "lockstep/base/error.h"

namespace lockstep::bench {
namespace {

[[noreturn]] void missing() {
  throw base::UsageError("this lockstep-bench was built without gloo's headers, which c10d's peers need",
                         "install libgloo-dev and build again");
}

}  // namespace

struct GlooPeer::Impl {};
GlooPeer::GlooPeer() { missing(); }
GlooPeer::~GlooPeer() = default;
void GlooPeer::all_reduce(std::vector<at::Tensor>&) { missing(); }
void GlooPeer::barrier() { missing(); }

struct ReducerPeer::Impl {};
ReducerPeer::ReducerPeer(torch::nn::Module&, bool) { missing(); }
ReducerPeer::~ReducerPeer() = default;
void ReducerPeer::before_forward() { missing(); }
void ReducerPeer::before_backward(const at::Tensor&) { missing(); }

}  // namespace lockstep::bench
