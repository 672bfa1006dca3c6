#include "lockstep/data/visit_tensors.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/data/collate.h"

namespace lockstep::data {
namespace {

template <typename T>
int count(T value) {
  int seen = 0;
  visit_tensors(value, [&](at::Tensor&) { ++seen; });
  return seen;
}

struct Custom {
  at::Tensor image, mask;
  void for_each_tensor(const TensorVisitor& visit) {
    visit(image);
    visit(mask);
  }
};

TEST(VisitTensors, VisitsTensorsInAnyBatchType) {
  const at::Tensor t = torch::ones({1});
  EXPECT_EQ(count(t), 1);
  EXPECT_EQ(count(Example{t, t}), 2);
  EXPECT_EQ(count(torch::data::Example<>(t, t)), 2);
  EXPECT_EQ(count(torch::data::TensorExample(t)), 1);
  EXPECT_EQ(count(std::vector<Example>{{t, t}, {t, t}}), 4);
  EXPECT_EQ(count(std::pair(std::string("name"), t)), 1);
  EXPECT_EQ(count(std::tuple(1, t, std::vector{t, t}, std::optional(t), std::optional<at::Tensor>())), 4);
  EXPECT_EQ(count(std::map<std::string, at::Tensor>{{"a", t}, {"b", t}}), 2);
  EXPECT_EQ(count(std::array{t, t, t}), 3);
  EXPECT_EQ(count(Custom{t, t}), 2);
  EXPECT_EQ(count(std::vector<std::string>{"a"}) + count(std::vector<bool>{true}) + count(3), 0);
}

TEST(VisitTensors, VisitorMayReplaceTensors) {
  std::vector<std::pair<int, at::Tensor>> batch = {{1, torch::ones({1})}};
  visit_tensors(batch, [](at::Tensor& tensor) { tensor = tensor + 1; });
  EXPECT_EQ(batch[0].second.item<float>(), 2);
}

}  // namespace
}  // namespace lockstep::data
