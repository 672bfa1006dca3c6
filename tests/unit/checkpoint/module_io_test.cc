#include "lockstep/checkpoint/module_io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;
using tests::TempDir;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width = 4)
      : first(register_module("first", torch::nn::Linear(3, width))),
        norm(register_module("norm", torch::nn::BatchNorm1d(width))),
        scale(register_parameter("scale", torch::randn({1}))) {}
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  at::Tensor scale;
};
TORCH_MODULE(Net);

// Two names of one parameter, as in language models.
struct SharedImpl : torch::nn::Module {
  SharedImpl() : layer(register_module("layer", torch::nn::Linear(2, 2))) { register_module("same", layer); }
  torch::nn::Linear layer;
};
TORCH_MODULE(Shared);

bool equal_state(const torch::nn::Module& a, const torch::nn::Module& b) {
  for (const auto& item : a.named_parameters())
    if (!item.value().equal(b.named_parameters()[item.key()])) return false;
  for (const auto& item : a.named_buffers())
    if (!item.value().equal(b.named_buffers()[item.key()])) return false;
  return true;
}

TEST(ModuleIo, SavesParameterNamesAndLoadsInPlace) {
  const TempDir folder;
  Net net, other;
  net->norm->running_mean.fill_(0.5);
  net->norm->num_batches_tracked.fill_(9);
  save(net, folder / "net.safetensors", {.metadata = {{"epoch", "3"}}});
  std::vector<std::string> names;
  const SafetensorsReader reader(folder / "net.safetensors");
  for (const auto& [name, entry] : reader.tensors()) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("first.bias", "first.weight", "norm.bias", "norm.num_batches_tracked",
                                 "norm.running_mean", "norm.running_var", "norm.weight", "scale"));
  ASSERT_FALSE(equal_state(*net, *other));
  torch::optim::SGD optimizer(other->parameters(), 1.0);
  const void* const address = other->first->weight.data_ptr();
  const auto report = load(other, folder / "net.safetensors");
  EXPECT_TRUE(equal_state(*net, *other));
  EXPECT_EQ(report.metadata.at("epoch"), "3");
  EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
  EXPECT_EQ(other->first->weight.data_ptr(), address);
  EXPECT_TRUE(other->first->weight.requires_grad() && other->first->weight.is_leaf());
  // The optimizer that was created before still updates these parameters.
  other->scale.mutable_grad() = torch::ones({1});
  optimizer.step();
  EXPECT_FALSE(other->scale.equal(net->scale));
}

TEST(ModuleIo, AcceptsHoldersPointersAndReferences) {
  const TempDir folder;
  const Net net;
  const auto path = folder / "x";
  const auto loads = [&] {
    Net by_holder, by_reference, by_pointer;
    load(by_holder, path);
    load(*by_reference, path);
    load(by_pointer.ptr(), path);
    return equal_state(*net, *by_holder) && equal_state(*net, *by_reference) && equal_state(*net, *by_pointer);
  };
  save(net, path);
  EXPECT_TRUE(loads());
  save(*net, path);
  EXPECT_TRUE(loads());
  save(std::make_shared<NetImpl>(*net), path);
  EXPECT_TRUE(loads());
  save(net.get(), path);
  EXPECT_TRUE(loads());
  const torch::nn::Module& base = *net;
  save(base, path);
  EXPECT_TRUE(loads());
  NetImpl plain;  // owned by no shared_ptr
  load(plain, path);
  EXPECT_TRUE(equal_state(*net, plain));
  save(plain, path);
  EXPECT_TRUE(loads());
  EXPECT_THAT(message_of<base::UsageError>([&] { save(Net(nullptr), path); }), HasSubstr("holder is empty"));
  EXPECT_THAT(message_of<base::UsageError>([&] { save(std::shared_ptr<NetImpl>(), path); }), HasSubstr("is null"));
  Net empty(nullptr);
  EXPECT_THAT(message_of<base::UsageError>([&] { load(empty, path); }), HasSubstr("holder is empty"));
}

TEST(ModuleIo, ListsMismatchesAndLeavesModuleUnchanged) {
  const TempDir folder;
  Net net;
  auto tensors = TensorMap{
      {"first.weight", torch::zeros({4, 3})}, {"first.bias", torch::zeros({4})}, {"scale", torch::zeros({1, 1})}};
  for (const char* const name : {"x1", "x2", "x3", "x4", "x5", "x6"}) tensors[name] = torch::zeros({1});
  save_tensors(tensors, folder / "x");
  const auto before = net->first->weight.clone();
  const auto error = tests::thrown<base::UsageError>([&] { load(net, folder / "x"); });
  EXPECT_EQ(error.cause(), base::Cause::kBadFile);
  EXPECT_EQ(error.what(),
            "cannot load " + (folder / "x") +
                std::string(": it does not match the module: 5 missing in the file (\"norm.bias\", "
                            "\"norm.num_batches_tracked\", \"norm.running_mean\", \"norm.running_var\", "
                            "\"norm.weight\"); 6 unexpected in the file (\"x1\", \"x2\", \"x3\", \"x4\", \"x5\", "
                            "...); 1 with another shape (\"scale\" [1, 1] in the file, [1] in the module)"));
  EXPECT_TRUE(net->first->weight.equal(before));
}

TEST(ModuleIo, NonStrictLoadReportsSkippedNames) {
  const TempDir folder;
  Net net;
  save_tensors({{"scale", torch::full({1}, 7.0f)}, {"x", torch::zeros({1})}}, folder / "x");
  const auto report = load(net, folder / "x", {.strict = false});
  EXPECT_EQ(net->scale.item<float>(), 7);
  EXPECT_EQ(report.missing.size(), 7u);
  EXPECT_THAT(report.unexpected, ElementsAre("x"));
  save_tensors({{"first.bias", torch::zeros({1})}}, folder / "x");  // copy_() would broadcast it
  EXPECT_THAT(message_of<base::UsageError>([&] { load(net, folder / "x", {.strict = false}); }),
              HasSubstr("1 with another shape"));
  save_tensors({{"scale", torch::zeros({2})}}, folder / "x");
  EXPECT_THAT(message_of<base::UsageError>([&] { load(net, folder / "x", {.strict = false}); }),
              HasSubstr("1 with another shape"));
}

TEST(ModuleIo, ConvertsDtypeOnRequest) {
  const TempDir folder;
  Net net, wide;
  wide->to(torch::kFloat64);
  save(wide, folder / "x");
  EXPECT_THAT(message_of<base::UsageError>([&] { load(net, folder / "x"); }),
              HasSubstr("8 with another dtype (\"first.bias\" F64 in the file, F32 in the module, "));
  load(net, folder / "x", {.convert_dtype = true});
  EXPECT_EQ(net->scale.scalar_type(), torch::kFloat32);
  EXPECT_TRUE(net->scale.equal(wide->scale.to(torch::kFloat32)));
}

TEST(ModuleIo, SkipsTheModulePrefixOfDdp) {
  const TempDir folder;
  Net net, other;
  TensorMap wrapped;
  for (const auto& item : net->named_parameters()) wrapped["module." + item.key()] = item.value();
  for (const auto& item : net->named_buffers()) wrapped["module." + item.key()] = item.value();
  save_tensors(wrapped, folder / "x");
  load(other, folder / "x");
  EXPECT_TRUE(equal_state(*net, *other));
  // If one name lacks the prefix, it is not removed.
  wrapped["scale"] = wrapped.extract("module.scale").mapped();
  save_tensors(wrapped, folder / "x");
  EXPECT_THAT(message_of<base::UsageError>([&] { load(other, folder / "x"); }), HasSubstr("7 missing in the file"));
}

TEST(ModuleIo, SavesAndLoadsTiedParameters) {
  const TempDir folder;
  Shared net, other;
  save(net, folder / "x");
  EXPECT_EQ(SafetensorsReader(folder / "x").tensors().size(), 4u);
  load(other, folder / "x");
  EXPECT_TRUE(equal_state(*net, *other));
  // Python's save_model() writes only one of the names.
  Shared third;
  save_tensors({{"same.weight", net->layer->weight}, {"same.bias", net->layer->bias}}, folder / "x");
  EXPECT_TRUE(load(third, folder / "x").missing.empty());
  EXPECT_TRUE(equal_state(*net, *third));
}

TEST(ModuleIo, RejectsParameterAndBufferOfTheSameName) {
  const TempDir folder;
  torch::nn::Module module;
  module.register_parameter("x", torch::ones({1}));
  module.register_buffer("x", torch::ones({1}));
  EXPECT_THAT(message_of<base::UsageError>([&] { save(module, folder / "f"); }),
              HasSubstr("a parameter and a buffer named \"x\""));
}

TEST(ModuleIo, DamagedFileDoesNotChangeModule) {
  const TempDir folder;
  struct Flags : torch::nn::Module {
    Flags()
        : weight(register_parameter("a", torch::zeros({3}))),
          flags(register_buffer("b", torch::zeros({3}, torch::kBool))) {}
    at::Tensor weight, flags;
  };
  Flags good, module;
  torch::NoGradGuard no_grad;
  good.weight.fill_(1);
  save(good, folder / "x");
  auto file = tests::read_file(folder / "x");
  file.back() = 5;
  folder.write("x", file);
  EXPECT_THROW(load(module, folder / "x"), base::FormatError);
  EXPECT_TRUE(module.weight.equal(torch::zeros({3}))) << "the damaged tensor is read after the intact one";
}

}  // namespace
}  // namespace lockstep::checkpoint
