// Tests what a program may do around step() of fused optimizers, and errors for invalid use.
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/interface/gradient_hook.h"
#include "lockstep/ddp/replicas.h"
#include "lockstep/optim/adam.h"
#include "lockstep/optim/clip_grad.h"
#include "lockstep/optim/sgd.h"
#include "tests/conformance/optim/optim_reference.h"
#include "tests/support/temp_dir.h"

namespace lockstep::tests::optim_usage_test {
namespace {

using ddp::DistributedDataParallel;

TEST(OptimUsage, InvalidOptionsAreRejected) {
  Mlp net, other;
  DistributedDataParallel ddp(net, world());
  const auto expect_usage_error = [&](const std::string& text, const std::function<void()>& make) {
    EXPECT_THAT(tests::message_of<base::UsageError>(make), ::testing::HasSubstr(text));
  };
  expect_usage_error("lr is -1", [&] { optim::SGD(ddp, {.lr = -1}); });
  expect_usage_error("with nesterov", [&] { optim::SGD(ddp, {.nesterov = true}); });
  expect_usage_error("betas is 1; expected", [&] { optim::AdamW(ddp, {.betas = {0.9, 1.0}}); });
  expect_usage_error("group 0", [&] { optim::Adam(ddp, {}, {{.parameters = other->parameters(), .options = {}}}); });
  expect_usage_error("group 1", [&] {
    optim::Adam(ddp, {},
                {{.parameters = net->parameters(), .options = {}}, {.parameters = net->parameters(), .options = {}}});
  });
  optim::SGD fused(ddp, {.lr = 0.1});
  expect_usage_error("max_norm is 0", [&] { optim::clip_grad_norm(fused, 0); });
  expect_usage_error("max is 0", [&] { optim::clip_grad_value(fused, 0); });
  expect_usage_error("clip_grad_value() has been called before", [&] {
    optim::clip_grad_value(fused, 1);
    optim::clip_grad_norm(fused, 1);
  });
  expect_usage_error("momentum is 0.5", [&] {
    static_cast<torch::optim::SGDOptions&>(fused.param_groups()[0].options()).momentum(0.5);
    fused.step();
  });
  // The parameter is a view of a larger tensor.
  struct PartImpl : torch::nn::Module {
    PartImpl() { register_parameter("w", torch::ones({10}).narrow(0, 0, 5)); }
  } part;
  DistributedDataParallel other_ddp(part, world());
  if (on_shm()) expect_usage_error("w is a part of a tensor", [&] { optim::SGD(other_ddp, {.lr = 0.1}); });
}

TEST(OptimUsage, ExternalChangesAreDetected) {
  if (!on_shm()) return;  // over other transports, each rank has its own parameters and may change them
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  ASSERT_TRUE(fused.shares_parameters());
  const auto step = [&] { fused.step(); };
  backward(*net, world().rank(), 0);
  torch::nn::utils::clip_grad_norm_(net->parameters(), 1e-3);  // changes the gradients of this rank through .data()
  EXPECT_THROW(step(), base::UsageError);
  EXPECT_THROW(fused.average_gradients(), base::UsageError);
  fused.zero_grad();
  backward(*net, world().rank(), 0);
  net->first->bias.mutable_grad().add_(1);
  EXPECT_THROW(step(), base::UsageError);
  fused.zero_grad();
  backward(*net, world().rank(), 0);
  step();
  net->to(at::kDouble);
  EXPECT_THROW(step(), base::UsageError);
}

// Before tests in which ranks of several hosts make different numbers of reductions.
TEST(OptimUsage, ProgressIsVisibleToOtherProcesses) {
  const auto own = base::telemetry::find_rank_page(::getpid());
  ASSERT_TRUE(own);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  constexpr int kSteps = 3;
  for (int i = 0; i < kSteps; ++i) {
    fused.zero_grad();
    backward(*net, world().rank(), i);
    optim::clip_grad_norm(fused, 1);
    fused.step();
  }
  world().barrier();
  std::vector<base::telemetry::RankSnapshot> ranks = base::telemetry::find_rank_pages();
  std::erase_if(ranks, [&](const auto& seen) { return seen.job != own->job; });
  ASSERT_EQ(static_cast<int>(ranks.size()), world().size());
  for (int rank = 0; rank < world().size(); ++rank) {
    const base::telemetry::RankSnapshot& seen = ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(seen.rank, rank);
    EXPECT_EQ(seen.transport, world().transport());
    // A world of one rank does not reduce gradients.
    EXPECT_GE(seen.gradient_reductions, world().size() > 1 ? own->gradient_reductions + kSteps : 0);
    EXPECT_TRUE(!on_shm() || seen.live_bytes > 0);
    EXPECT_GE(seen.peak_live_bytes, seen.live_bytes);
  }
  world().barrier();
}

/// Trains beside a model of this rank alone, whose ranks share nothing.
struct TrainedTwice {
  TrainedTwice() { copy_values(*net, *reference); }
  void step(int index) {
    fused.zero_grad();
    backward(*net, world().rank(), index);
    fused.step();
    reference_optimizer.zero_grad();
    backward(*reference, world().rank(), index);
    for (const at::Tensor& p : reference->parameters()) world().all_reduce(p.grad(), comm::ReduceOp::kMean);
    reference_optimizer.step();
  }
  /// Writes both models.
  void write(const std::function<void(at::Tensor)>& change) {
    const at::NoGradGuard no_grad;
    for (auto* one : {&net, &reference})
      for (const at::Tensor& p : (*one)->parameters()) change(p);
  }
  void expect_equal() {
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(torch::allclose(net->parameters()[i], reference->parameters()[i], 1e-5, 1e-6)) << i;
    EXPECT_TRUE(same_bits(net->first->weight.detach()));
  }

  Mlp net, reference;
  DistributedDataParallel ddp{net, world()};
  optim::SGD fused{ddp, {.lr = 0.1, .momentum = 0.9}};
  torch::optim::SGD reference_optimizer{reference->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
};

TEST(OptimUsage, WritesOfAllRanksAreAppliedOnce) {
  torch::manual_seed(1);
  TrainedTwice both;
  both.write([](at::Tensor p) { p.mul_(0.5); });
  both.step(0);
  both.expect_equal();
  both.write([](const at::Tensor& p) { p.data().mul_(0.5); });
  both.expect_equal();  // before step() too, because each rank has its own values
  both.step(1);
  both.expect_equal();
  both.write([](const at::Tensor& p) { p.data().add_(0); });  // nothing changes
  both.step(2);
  both.expect_equal();
  int calls = 0;
  both.fused.change_parameters([&] {
    ++calls;
    const at::NoGradGuard no_grad;
    both.net->first->weight.fill_(0.25);
  });
  at::Tensor all_calls = torch::tensor({calls});
  world().all_reduce(all_calls);
  EXPECT_TRUE(!both.fused.shares_parameters() || world().num_nodes() > 1 || all_calls.item<int>() == 1);
  EXPECT_TRUE(torch::equal(both.net->first->weight, torch::full({13, 7}, 0.25)));
  {
    const at::NoGradGuard no_grad;
    both.reference->first->weight.fill_(0.25);
  }
  both.step(3);
  both.expect_equal();
}

TEST(OptimUsage, WritesOfOneRankConcernOnlyItUntilTheyAreUndone) {
  torch::manual_seed(1);
  TrainedTwice both;
  both.step(0);
  const at::Tensor before = both.net->first->weight.detach().clone();
  if (world().rank() == 0) {
    const at::NoGradGuard no_grad;
    both.net->first->weight.data().zero_();  // as for an evaluation with averaged weights
  }
  world().barrier();
  EXPECT_EQ(torch::equal(both.net->first->weight, before), world().rank() != 0);
  world().barrier();
  if (world().rank() == 0) both.net->first->weight.data().copy_(before);
  both.step(1);
  both.step(2);
  both.expect_equal();
}

TEST(OptimUsage, DifferentWritesAreNamed) {
  torch::manual_seed(1);
  if (!on_shm()) return;  // elsewhere a rank may have parameters of its own
  TrainedTwice both;
  both.step(0);
  const at::NoGradGuard no_grad;
  both.net->second->weight.data().fill_(world().local_rank());
  const auto expect_error = [&](const std::function<void()>& call) {
    const auto error = tests::thrown<base::UsageError>(call);
    EXPECT_NE(std::string(error.what()).find("second.weight"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.hint()).find("change_parameters()"), std::string::npos) << error.hint();
  };
  expect_error([&] { both.fused.step(); });
  expect_error([&] { both.fused.change_parameters([] {}); });
  both.net->second->weight.data().fill_(1);
  both.fused.change_parameters([] {});
  EXPECT_TRUE(torch::equal(both.net->second->weight, torch::ones_like(both.net->second->weight)));
  EXPECT_TRUE(same_bits(both.net->second->weight.detach()));
}

TEST(OptimUsage, WriteBeforeUpdateInBackwardIsNamed) {
  torch::manual_seed(1);
  if (!on_shm()) return;  // elsewhere a rank may have parameters of its own
  TrainedTwice both;
  both.fused.update_in_backward();
  {
    const at::NoGradGuard no_grad;
    both.net->first->bias.data().fill_(1);
  }
  EXPECT_THROW(backward(*both.net, world().rank(), 0), base::UsageError);
}

TEST(OptimUsageFailures, WriteOfOneRankIsNamed) {
  torch::manual_seed(1);
  if (!on_shm()) return;  // elsewhere a rank may have parameters of its own
  TrainedTwice both;
  both.step(0);
  if (world().rank() == 0) both.net->second->weight.data().fill_(7);
  EXPECT_THAT(tests::message_of<base::DesyncError>([&] { both.fused.step(); }),
              ::testing::HasSubstr("parameter second.weight, changed outside step()"));
}

TEST(OptimUsage, RanksOfAHostShareParameters) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1, .momentum = 0.9});
  const comm::Group host = world().split_by_host();
  const bool can = world().transport() == "shm" || world().transport() == "hierarchy";
  EXPECT_EQ(fused.shares_parameters(), can && host.size() > 1);
  fused.change_parameters([&] {
    const at::NoGradGuard no_grad;
    net->first->weight.add_(1);  // runs once for each copy of the parameters
  });
  EXPECT_TRUE(same_bits(net->first->weight.detach()));
  backward(*net, world().rank(), 0);
  fused.step();
  EXPECT_TRUE(same_bits(net->first->weight.detach()));
}

/// Returns the host of each rank.
std::vector<int> hosts_of_ranks() {
  const at::Tensor all = at::empty({world().size()}, at::kInt);
  world().all_gather(all, at::full({1}, world().node_rank(), at::kInt));
  return {all.const_data_ptr<int>(), all.const_data_ptr<int>() + world().size()};
}

/// Sums buckets.
class SumHook final : public comm::GradientHook {
 public:
  std::string name() const override { return "sum"; }
  comm::PendingPtr start(comm::Bucket& bucket, comm::HookContext& context) override {
    return context.all_reduce(bucket.buffer);
  }
  void finish(comm::Bucket&, comm::HookContext&) override {}
};

TEST(OptimUsage, HostSyncEveryUpdatesFromHostMeans) {
  const std::vector<int> hosts = hosts_of_ranks();
  for (const auto& [early, hooked] : {std::pair{false, false}, {true, false}, {false, true}}) {
    torch::manual_seed(1);
    Mlp net;
    DistributedDataParallel ddp(net, world(),
                                {.hook = hooked ? std::make_shared<SumHook>() : nullptr, .average_hosts_every = 2});
    std::vector<Mlp> references(static_cast<std::size_t>(world().num_nodes()));
    for (Mlp& reference : references) copy_values(*net, *reference);
    optim::SGD fused(ddp, {.lr = 0.02});
    if (early) fused.update_in_backward();
    for (int step = 1; step <= 4; ++step) {
      fused.zero_grad();
      backward(*net, world().rank(), step);
      fused.step();
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> sums(4);
      for (int host = 0; host < world().num_nodes(); ++host) {
        Mlp& reference = references[static_cast<std::size_t>(host)];
        reference->zero_grad();
        const auto ranks = std::count(hosts.begin(), hosts.end(), host);
        for (int rank = 0; rank < world().size(); ++rank) {
          const at::AutoGradMode with_gradients(true);
          if (hosts[static_cast<std::size_t>(rank)] == host) backward(*reference, rank, step);
        }
        for (std::size_t i = 0; i < sums.size(); ++i) {
          at::Tensor parameter = reference->parameters()[i];
          parameter.sub_(parameter.grad(), 0.02 / static_cast<double>(ranks));
          const at::Tensor weighed = parameter * ranks;
          sums[i] = sums[i].defined() ? sums[i] + weighed : weighed;
        }
      }
      for (std::size_t i = 0; i < sums.size(); ++i) {
        if (step % 2 == 0)
          for (Mlp& reference : references) reference->parameters()[i].copy_(sums[i] / world().size());
        const at::Tensor expected = references[static_cast<std::size_t>(world().node_rank())]->parameters()[i];
        EXPECT_TRUE(torch::allclose(net->parameters()[i], expected, 1e-5, 1e-6))
            << "early " << early << ", hook " << hooked << ", step " << step << ", parameter " << i;
      }
      world().barrier();  // all ranks have compared
    }
  }
}

TEST(OptimUsage, GraphRecordedBeforeUpdateFails) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  backward(*net, world().rank(), 0);
  const at::Tensor late = net->forward(batch_of(world().rank(), 1, {4, 7})).pow(2).sum();
  fused.step();
  EXPECT_THROW(late.backward(), c10::Error);
}

TEST(OptimUsage, ParametersAreUnsharedAfterDestruction) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  const at::Tensor alias = net->first->weight.detach();  // refers to the same storage
  {
    optim::SGD fused(ddp, {.lr = 0.1});
    backward(*net, world().rank(), 0);
    fused.step();
    EXPECT_EQ(alias.data_ptr(), net->first->weight.data_ptr());
    EXPECT_TRUE(torch::equal(alias, net->first->weight));
  }
  EXPECT_TRUE(torch::equal(alias, net->first->weight));
  EXPECT_TRUE(same_bits(net->first->weight.detach()));
  {
    const at::NoGradGuard no_grad;
    net->first->weight.fill_(world().rank());
  }
  world().barrier();
  EXPECT_EQ(net->first->weight[0][0].item<int>(), world().rank());
  world().barrier();
  {
    const at::NoGradGuard no_grad;
    net->first->weight.fill_(0.5);
  }
  net->zero_grad();
  backward(*net, world().rank(), 1);  // averages again
  EXPECT_TRUE(same_bits(net->second->bias.grad()));
}

TEST(OptimUsage, StateDictRoundTrip) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  checkpoint::StateDict saved;
  std::vector<at::Tensor> after;
  const auto steps = [&](torch::optim::Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      backward(*net, world().rank(), step);
      optimizer.step();
    }
  };
  std::vector<at::Tensor> middle;
  {
    optim::AdamW fused(ddp, {.lr = 0.01});
    EXPECT_TRUE(fused.state_dict().empty());
    steps(fused, 0, 3);
    saved = checkpoint::clone_state(fused.state_dict());
    for (const at::Tensor& p : net->parameters()) middle.push_back(p.detach().clone());
    steps(fused, 3, 6);
    for (const at::Tensor& p : net->parameters()) after.push_back(p.detach().clone());
  }
  EXPECT_EQ(saved.size(), 4 * 3U);
  optim::AdamW again(ddp, {.lr = 0.01});
  again.change_parameters([&] {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < middle.size(); ++i) net->parameters()[i].copy_(middle[i]);
  });
  auto broken = saved;
  broken["unknown.exp_avg"] = at::zeros({1});
  EXPECT_THROW(again.load_state_dict(broken), base::UsageError);
  broken = saved;
  broken.erase(std::prev(broken.end()));
  EXPECT_THROW(again.load_state_dict(broken), base::UsageError);
  EXPECT_TRUE(again.state_dict().empty());
  again.load_state_dict(saved);
  steps(again, 3, 6);
  for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(torch::equal(net->parameters()[i], after[i]));
}

TEST(OptimUsage, TorchArchiveAndStateBroadcast) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  std::stringstream bytes;
  checkpoint::StateDict saved;
  {
    optim::SGD fused(ddp, {.lr = 0.01, .momentum = 0.9});
    for (int step = 0; step < 3; ++step) {
      fused.zero_grad();
      backward(*net, world().rank(), step);
      fused.step();
    }
    saved = checkpoint::clone_state(fused.state_dict());
    torch::serialize::OutputArchive out;
    fused.save(out);
    out.save_to(bytes);
    ddp::broadcast_optimizer_state(fused, world());
    EXPECT_EQ(fused.state_dict().size(), saved.size());
  }
  optim::SGD again(ddp, {.lr = 0.5, .momentum = 0.9});
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  again.load(in);
  EXPECT_EQ(again.param_groups()[0].options().get_lr(), 0.01);
  const auto loaded = again.state_dict();
  ASSERT_EQ(loaded.size(), saved.size());
  for (const auto& [name, value] : saved)
    EXPECT_TRUE(torch::equal(std::get<at::Tensor>(loaded.at(name)), std::get<at::Tensor>(value))) << name;
  world().barrier();
  backward(*net, world().rank(), 9);
  again.step();
  EXPECT_TRUE(same_bits(net->first->weight.detach()));
}

TEST(OptimUsage, JoinedRanksShadowOthers) {
  torch::manual_seed(1);
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::AdamW fused(ddp, {.lr = 0.01});
  const int batches = 2 + world().rank();
  if (world().transport() == "hierarchy") {  // across hosts, ranks do not exchange how many updates each makes
    EXPECT_THROW(ddp::join(ddp, [] {}), base::UsageError);
    return;
  }
  ddp::join(ddp, [&] {
    for (int step = 0; step < batches; ++step) {
      fused.zero_grad();
      backward(*net, world().rank(), step);
      optim::clip_grad_norm(fused, 1.0);
      fused.step();
    }
  });
  for (const auto& item : net->named_parameters()) EXPECT_TRUE(same_bits(item.value().detach())) << item.key();
  for (const auto& [name, state] : fused.state_dict()) {
    if (on_shm() && name.ends_with(".step")) {
      EXPECT_EQ(std::get<at::Tensor>(state).item<std::int64_t>(), 1 + world().size());
    }
  }
}

TEST(OptimUsage, SparseGradientsAreRejected) {
  struct WordsImpl : torch::nn::Module {
    WordsImpl() {
      words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true)));
    }
    torch::nn::Embedding words{nullptr};
  } net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  net.words->forward(torch::tensor({1, 2})).sum().backward();
  EXPECT_THROW(fused.step(), base::UsageError);
}

TEST(OptimUsage, StepInsideBackwardIsRejected) {
  Mlp net;
  DistributedDataParallel ddp(net, world());
  optim::SGD fused(ddp, {.lr = 0.1});
  const at::Tensor before = net->second->bias.detach().clone();
  net->second->bias.register_hook([&](const at::Tensor&) { fused.step(); });
  EXPECT_THROW(net->forward(batch_of(world().rank(), 0, {4, 7})).sum().backward(), base::UsageError);
  EXPECT_TRUE(torch::equal(before, net->second->bias));
  world().barrier();
}

TEST(OptimUsage, StepAfterDdpIsDestroyedIsRejected) {
  Mlp net;
  auto ddp = std::make_unique<DistributedDataParallel>(net, world());
  optim::SGD fused(*ddp, {.lr = 0.1});
  ddp.reset();
  if (!on_shm()) return;
  EXPECT_THROW(fused.step(), base::UsageError);
}

}  // namespace
}  // namespace lockstep::tests::optim_usage_test
