#include "lockstep/checkpoint/staging_buffer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::checkpoint {
namespace {

const at::Tensor& tensor_in(const CheckpointParts& parts, const std::string& name) {
  return std::get<at::Tensor>(parts.at("model").at(name));
}

// Blocks of 16 KiB and the remainder are copied in different ways.
TEST(StagingBuffer, CopiesAnyNumberOfBytes) {
  CheckpointParts parts;
  for (const std::int64_t size : {0, 1, 63, 64, 4096, 16383, 16384, 16385, 20480, 32768, 49151, 1000003})
    parts["model"][std::to_string(size)] = torch::randint(256, {size}, torch::kByte);
  StagingBuffer stage;
  for (int round = 0; round < 2; ++round) {  // the second round reuses the memory
    CheckpointParts before;
    for (auto& [name, value] : parts["model"]) before["model"][name] = std::get<at::Tensor>(value).clone();
    const CheckpointParts copy = stage.copy(parts);
    for (auto& [name, value] : parts["model"]) std::get<at::Tensor>(value).bitwise_not_();
    for (const auto& [name, value] : copy.at("model"))
      EXPECT_TRUE(tensor_in(copy, name).equal(tensor_in(before, name))) << name << " bytes, round " << round;
  }
}

// Views with unaligned ends, and views of a part of their memory.
TEST(StagingBuffer, CopiesViewsWithTheirShapes) {
  const at::Tensor all = torch::randn({300, 301});
  CheckpointParts parts;
  auto& model = parts["model"];
  model["behind one"] = all.flatten().narrow(0, 1, 80000);
  model["transposed"] = all.t();
  model["rows"] = all.narrow(0, 7, 100);
  model["one"] = all[3][4];
  model["half"] = all.to(torch::kBFloat16);
  model["complex"] = torch::view_as_complex(torch::randn({5000, 2})).conj();
  StagingBuffer stage;
  const CheckpointParts kept = stage.copy(parts);
  for (const auto& [name, value] : model) {
    const at::Tensor& original = std::get<at::Tensor>(value);
    EXPECT_EQ(tensor_in(kept, name).sizes(), original.sizes()) << name;
    EXPECT_TRUE(tensor_in(kept, name).equal(original)) << name;
    EXPECT_FALSE(tensor_in(kept, name).is_alias_of(original)) << name;
  }
}

}  // namespace
}  // namespace lockstep::checkpoint
