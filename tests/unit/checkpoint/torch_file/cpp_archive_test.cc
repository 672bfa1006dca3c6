// Reads archives that torch::save() of C++ wrote.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include "lockstep/base/fd.h"
#include "lockstep/checkpoint/module_io.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;
using tests::message_of;
using tests::TempDir;

const at::ScalarType kArchiveDtypes[] = {torch::kFloat64,
                                         torch::kFloat32,
                                         torch::kFloat16,
                                         torch::kBFloat16,
                                         torch::kInt64,
                                         torch::kInt32,
                                         torch::kInt16,
                                         torch::kInt8,
                                         torch::kUInt8,
                                         torch::kBool,
                                         torch::kUInt16,
                                         torch::kUInt32,
                                         torch::kUInt64,
                                         torch::kComplexDouble,
                                         torch::kComplexFloat,
                                         at::ScalarType::ComplexHalf,
                                         torch::kFloat8_e4m3fn,
                                         torch::kFloat8_e5m2,
                                         at::ScalarType::Float8_e4m3fnuz,
                                         at::ScalarType::Float8_e5m2fnuz,
                                         at::ScalarType::Float8_e8m0fnu};

// Nested modules, buffers of every dtype, tied parameters, an undefined buffer, and modules without tensors.
struct ArchivedNetImpl : torch::nn::Module {
  ArchivedNetImpl()
      : layers(register_module("layers", torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::ReLU(),
                                                               torch::nn::BatchNorm1d(4), torch::nn::Dropout()))),
        head(register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 2).bias(false)))),
        scale(register_parameter("scale", torch::randn({1}))) {
    register_module("tied", head);
    register_buffer("none", at::Tensor());
    register_buffer("transposed", torch::randn({3, 5}).t());
    for (const auto type : kArchiveDtypes) register_buffer(c10::toString(type), torch::randint(2, {3}).to(type));
  }
  torch::nn::Sequential layers;
  torch::nn::Linear head;
  at::Tensor scale;
};
TORCH_MODULE(ArchivedNet);

TensorMap archived_state(const ArchivedNet& net) {
  TensorMap state;
  for (const auto& item : net->named_parameters()) state[item.key()] = item.value();
  for (const auto& item : net->named_buffers())
    if (item.value().defined()) state[item.key()] = item.value();
  return state;
}

std::string contents_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

TEST(CppArchive, LoadsModulesUnderTheirNames) {
  const TempDir folder;
  torch::manual_seed(1);
  ArchivedNet net;
  torch::manual_seed(2);
  ArchivedNet other;
  torch::save(net, folder / "x.pt");
  const auto report = load(other, folder / "x.pt");
  EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
  const TensorMap want = archived_state(net), got = archived_state(other);
  ASSERT_EQ(want.size(), got.size());
  ASSERT_TRUE(want.contains("layers.2.running_mean") && want.contains("tied.weight"));
  for (const auto& [name, tensor] : want) {
    EXPECT_EQ(got.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(contents_of(got.at(name)), contents_of(tensor)) << name;
  }
  EXPECT_TRUE(other->head->weight.requires_grad());
  // torch::load() reads the same values.
  ArchivedNet third;
  torch::load(third, folder / "x.pt");
  EXPECT_TRUE(third->scale.equal(other->scale));
  // A pointer is saved like a holder.
  torch::save(net.ptr(), folder / "y.pt");
  EXPECT_TRUE(load(other, folder / "y.pt").missing.empty());
}

TEST(CppArchive, ReportsMismatchesLikeOtherFiles) {
  const TempDir folder;
  torch::nn::Linear linear(2, 3);
  torch::save(linear, folder / "x.pt");
  torch::nn::Linear wide(4, 3), without_bias(torch::nn::LinearOptions(2, 3).bias(false));
  EXPECT_THAT(message_of<base::UsageError>([&] { load(wide, folder / "x.pt"); }),
              HasSubstr("1 with another shape (\"weight\" [3, 2] in the file, [3, 4] in the module)"));
  EXPECT_THAT(load(without_bias, folder / "x.pt", {.strict = false}).unexpected, testing::ElementsAre("bias"));
  EXPECT_TRUE(without_bias->weight.equal(linear->weight));
}

TEST(CppArchive, OtherContentsAreErrorsOrValues) {
  const TempDir folder;
  torch::nn::Linear linear(2, 3);
  torch::optim::Adam optimizer(linear->parameters(), 0.1);
  linear(torch::ones({1, 2})).sum().backward();
  optimizer.step();
  torch::save(optimizer, folder / "optimizer.pt");
  EXPECT_THAT(message_of<base::UsageError>([&] { load(linear, folder / "optimizer.pt"); }),
              HasSubstr("it contains an optimizer; expected a module"));
  const Value state = load_torch_file(folder / "optimizer.pt");
  EXPECT_TRUE(state.as<Dict>()->module);
  EXPECT_TRUE(state.as<Dict>()->find("state")->as<Dict>()->module);
  torch::save(std::vector<at::Tensor>{torch::ones({2}), torch::zeros({3})}, folder / "list.pt");
  EXPECT_TRUE(load_torch_file(folder / "list.pt").as<Dict>()->find("1")->as<at::Tensor>()->equal(torch::zeros({3})));
  EXPECT_THAT(message_of<base::UsageError>([&] { load(linear, folder / "list.pt"); }),
              HasSubstr("2 unexpected in the file (\"0\", \"1\")"));
  torch::serialize::OutputArchive archive;
  archive.write("weight", torch::ones({3, 2}));
  archive.write("epoch", c10::IValue(7));
  archive.save_to(folder / "mixed.pt");
  EXPECT_THAT(message_of<base::UsageError>([&] { load(linear, folder / "mixed.pt"); }),
              HasSubstr("it contains an integer under the name \"epoch\""));
}

TEST(CppArchive, DamageIsATypedErrorAndChangesNothing) {
  const TempDir folder;
  torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
  torch::save(net, folder / "good");
  const std::string good = tests::read_file(folder / "good");
  torch::nn::Sequential other(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
  const auto before = other[0]->as<torch::nn::Linear>()->weight.clone();
  for (std::size_t cut = 0; cut < good.size(); cut += 7)
    EXPECT_THROW(load(other, folder.write("x", good.substr(0, cut))), base::Error) << cut;
  EXPECT_TRUE(other[0]->as<torch::nn::Linear>()->weight.equal(before));
  std::size_t num_loaded = 0;
  const std::string path = folder.write("x", good);
  const base::Fd file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  for (std::size_t bit = 0; bit < good.size() * 8; bit += 3) {
    const char flipped = static_cast<char>(good[bit / 8] ^ (1 << bit % 8));
    ASSERT_EQ(::pwrite(file.get(), &flipped, 1, static_cast<off_t>(bit / 8)), 1);
    try {
      load(other, path);
      ++num_loaded;  // for example a time stamp, padding, or a record that is not read
    } catch (const base::Error&) {
    }
    ASSERT_EQ(::pwrite(file.get(), &good[bit / 8], 1, static_cast<off_t>(bit / 8)), 1);
  }
  EXPECT_LT(num_loaded, good.size() * 8 / 3);
}

}  // namespace
}  // namespace lockstep::checkpoint
