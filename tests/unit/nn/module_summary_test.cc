// Tests the table that describes a module.
#include "lockstep/nn/module_summary.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::tests {
namespace {

struct SummaryNetImpl : torch::nn::Module {
  SummaryNetImpl() {
    body = register_module("body", torch::nn::Sequential(torch::nn::Linear(1000, 1000), torch::nn::BatchNorm1d(1000)));
    head = register_module("head", torch::nn::Linear(1000, 10));
    head->bias.requires_grad_(false);
  }
  torch::nn::Sequential body{nullptr};
  torch::nn::Linear head{nullptr};
};

TEST(ModuleSummary, CountsParametersAndMemory) {
  EXPECT_EQ(nn::module_summary(SummaryNetImpl()),
            "module  kind        parameters    memory\n"
            "body    Sequential   1,003,000   3.8 MiB\n"
            "head    Linear          10,010  39.1 KiB\n"
            "all     SummaryNet   1,013,010   3.9 MiB\n"
            "1,013,000 parameters are trainable, with 3.9 MiB of gradients; buffers take 7.8 KiB\n");
}

TEST(ModuleSummary, LimitsDepthAndCountsSharedParametersOnce) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
      register_module("again", first);
    }
    torch::nn::Linear first{nullptr};
  };
  EXPECT_EQ(nn::module_summary(TiedImpl(), 0),
            "module  kind  parameters  memory\n"
            "all     Tied          16    64 B\n"
            "16 parameters are trainable, with 64 B of gradients; buffers take 0 B\n");
  const std::string deep = nn::module_summary(SummaryNetImpl(), 2);
  EXPECT_NE(deep.find("\n  0     Linear        1,001,000   3.8 MiB\n"), std::string::npos) << deep;
}

}  // namespace
}  // namespace lockstep::tests
