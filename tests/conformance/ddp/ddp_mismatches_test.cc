// Tests that DistributedDataParallel reports the first difference of models or options between ranks. Each case is a
// job of its own.
#include <chrono>
#include <cstdint>

#include "lockstep/base/error.h"
#include "tests/conformance/ddp/test_models.h"

namespace lockstep::tests::ddp_mismatches_test {
namespace {

using base::Cause;
using ddp::DistributedDataParallel;

/// Changes the model of the last rank, and expects an error that contains each of `words`.
template <typename Change>
void expect_model_difference(const std::vector<std::string>& words, const Change& change) {
  torch::manual_seed(1);
  Mlp net;
  std::vector<at::Tensor> keep = net->parameters();
  if (world().rank() == world().size() - 1) change(net);
  expect_error(
      Cause::kConfigMismatch, words, [&] { DistributedDataParallel ddp(net, world()); }, std::chrono::seconds(2));
}

TEST(DdpMismatches, DifferentParameterShape) {
  expect_model_difference({"first.weight", "[13, 7]", "[14, 7]"}, [](Mlp& net) { net = Mlp(7, 14, 5); });
}

TEST(DdpMismatches, DifferentNumberOfDimensions) {
  expect_model_difference({"first.weight", "[13, 7]", "[13, 7, 1]"}, [](Mlp& net) {
    const at::NoGradGuard no_grad;
    net->first->weight.set_data(torch::ones({13, 7, 1}));
  });
}

TEST(DdpMismatches, DifferentParameterDtype) {
  expect_model_difference({"first.weight", "Float", "Double"}, [](Mlp& net) { net->to(at::kDouble); });
}

TEST(DdpMismatches, DifferentRequiresGrad) {
  expect_model_difference({"second.bias", "frozen"}, [](Mlp& net) { net->second->bias.requires_grad_(false); });
}

TEST(DdpMismatches, ExtraParameter) {
  expect_model_difference({"extra"}, [](Mlp& net) { net->register_parameter("extra", torch::ones({2})); });
}

TEST(DdpMismatches, ExtraBuffer) {
  expect_model_difference({"buffer extra"}, [](Mlp& net) { net->register_buffer("extra", torch::ones({2})); });
}

TEST(DdpMismatches, DifferentDdpOptions) {
  Mlp net;
  const std::int64_t cap = 1000 + world().rank();
  expect_error(
      Cause::kConfigMismatch, {"bucket_bytes 1000", "bucket_bytes 1001"},
      [&] { DistributedDataParallel ddp(net, world(), {.bucket_bytes = {cap}}); }, std::chrono::seconds(2));
}

}  // namespace
}  // namespace lockstep::tests::ddp_mismatches_test
