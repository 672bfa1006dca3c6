#include <torch/torch.h>

#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "bench/ranks/c10d_baselines.h"
#include "bench/ranks/harness_channel.h"
#include "lockstep/base/env.h"
#include "lockstep/base/parse.h"

namespace lockstep::bench {
namespace {

c10::intrusive_ptr<c10d::TCPStore> make_store() {
  const auto& env = base::Env::this_process();
  c10d::TCPStoreOptions options;
  options.port =
      static_cast<std::uint16_t>(base::parse_int_in_range("MASTER_PORT", env.master_port.value_or(""), 1, 65535));
  options.isServer = own_rank() == 0;
  return c10::make_intrusive<c10d::TCPStore>(env.master_addr.value_or("127.0.0.1"), options);
}

c10::intrusive_ptr<c10d::ProcessGroupGloo> make_gloo(const c10::intrusive_ptr<c10d::Store>& store) {
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, own_rank(), num_ranks(), options);
}

}  // namespace

struct GlooBaseline::Impl {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo = make_gloo(make_store());
};
GlooBaseline::GlooBaseline() : impl_(std::make_unique<Impl>()) {}
GlooBaseline::~GlooBaseline() = default;
void GlooBaseline::all_reduce(std::vector<at::Tensor>& tensor) {
  impl_->gloo->allreduce(tensor)->wait();  // bounded: by the process group
}
void GlooBaseline::barrier() {
  impl_->gloo->barrier()->wait();  // bounded: by the process group
}

struct ReducerBaseline::Impl {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::unique_ptr<c10d::Reducer> reducer;
};

ReducerBaseline::ReducerBaseline(torch::nn::Module& net, bool bucket_views) : impl_(std::make_unique<Impl>()) {
  const auto store = make_store();
  const auto gloo = make_gloo(store);
  impl_->group = c10::make_intrusive<c10d::ProcessGroup>(store, own_rank(), num_ranks());
  impl_->group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  impl_->group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  const auto parameters = net.parameters();
  for (const at::Tensor& parameter : parameters) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> one{parameter.detach()};
    gloo->broadcast(one)->wait();  // bounded: by the process group
  }
  std::unordered_map<std::size_t, std::string> names;
  for (const auto& item : net.named_parameters()) names[names.size()] = item.key();
  const std::vector<bool> dense(parameters.size(), false);
  const std::vector<std::size_t> caps{std::size_t{1} << 20, std::size_t{25} << 20};
  auto [buckets, limits] = c10d::compute_bucket_assignment_by_size(parameters, caps, dense);
  std::reverse(buckets.begin(), buckets.end());
  impl_->reducer = std::make_unique<c10d::Reducer>(
      parameters, buckets, impl_->group, dense, std::int64_t{25} << 20,
      /*find_unused_parameters=*/false, bucket_views, names, std::int64_t{1} << 20,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false, std::vector<std::int64_t>{});
}
ReducerBaseline::~ReducerBaseline() = default;
void ReducerBaseline::before_forward() {
  impl_->reducer->prepare_for_forward();
  impl_->reducer->rebuild_buckets();
}
void ReducerBaseline::before_backward(const at::Tensor& output) { impl_->reducer->prepare_for_backward({output}); }

}  // namespace lockstep::bench
