// Tests which saved positions a loader accepts, and by what ranks compare their orders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/data/loader.h"
#include "tests/support/temp_dir.h"

namespace lockstep::data {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;

TEST(LoaderPosition, OfAnotherLoaderIsRejected) {
  auto loader = make_loader(10, [](std::size_t i) { return static_cast<std::int64_t>(i); }, DataShard{}, {.seed = 1});
  const auto load = [&](const LoaderPosition& position) { loader.load_state_dict(to_state_dict(position)); };
  EXPECT_THROW(load({.seed = 2, .samples_drawn = 6, .num_samples = 10}), base::UsageError);
  EXPECT_THROW(load({.seed = 1, .samples_drawn = 6, .num_samples = 11}), base::UsageError);
  EXPECT_THROW(load({.seed = 1, .samples_drawn = 11, .num_samples = 10}), base::UsageError);
  EXPECT_THROW(load({.seed = 1, .num_samples = 10, .shuffle = false}), base::UsageError);
  // The errors say where the position is, and what can be done there.
  const auto error_at = [&](std::uint64_t samples_drawn) {
    const auto error = tests::thrown<base::UsageError>(
        [&] { load({.seed = 2, .epoch = 3, .samples_drawn = samples_drawn, .num_samples = 10}); });
    return std::string(error.what()) + "; " + error.hint();
  };
  EXPECT_THAT(error_at(6), AllOf(HasSubstr("the saved position is inside epoch 3 with seed 2, and this loader has 1;"),
                                 HasSubstr("or do not restore it and begin with epoch(4), without the samples that")));
  EXPECT_THAT(error_at(10), AllOf(HasSubstr("is at the end of epoch 3 with seed 2"), EndsWith("begin with epoch(4)")));
  EXPECT_THAT(error_at(0), AllOf(HasSubstr("is at the beginning of epoch 3 with"), EndsWith("begin with epoch(3)")));
  EXPECT_THAT(error_at(11), HasSubstr("is beyond the end of its dataset; expected at most 10 samples"));
  EXPECT_EQ(loader.epoch(0).size(), 10u) << "unchanged";
}

TEST(OrderFingerprint, DependsOnOrderOnly) {
  const LoaderPosition here{.seed = 1, .epoch = 2, .num_samples = 100, .shuffle = true};
  const auto hash_of = [](const LoaderPosition& position, std::int64_t batch_size, ShardMode mode) {
    return order_fingerprint(position, batch_size, mode).hash;
  };
  const std::uint32_t ours = hash_of(here, 4, ShardMode::kPad);
  LoaderPosition later = here;
  later.samples_drawn = 50;
  EXPECT_EQ(hash_of(later, 4, ShardMode::kPad), ours);
  EXPECT_NE(hash_of(here, 4, ShardMode::kDrop), ours);
  EXPECT_NE(hash_of(here, 5, ShardMode::kPad), ours);
  for (const LoaderPosition& other : {LoaderPosition{.seed = 2, .epoch = 2, .num_samples = 100, .shuffle = true},
                                      LoaderPosition{.seed = 1, .epoch = 3, .num_samples = 100, .shuffle = true},
                                      LoaderPosition{.seed = 1, .epoch = 2, .num_samples = 101, .shuffle = true},
                                      LoaderPosition{.seed = 1, .epoch = 2, .num_samples = 100, .shuffle = false}})
    EXPECT_NE(hash_of(other, 4, ShardMode::kPad), ours);
}

TEST(OrderFingerprint, ItsPartsTellWhatDiffers) {
  const LoaderPosition here{.seed = 1, .epoch = 2, .num_samples = 100, .shuffle = true};
  const auto differing = [&](const auto& change) {  // the parts that differ, a bit for each
    LoaderPosition position = here;
    std::int64_t batch_size = 4;
    ShardMode mode = ShardMode::kPad;
    change(position, batch_size, mode);
    const int difference =
        order_fingerprint(position, batch_size, mode).parts ^ order_fingerprint(here, 4, ShardMode::kPad).parts;
    int parts = 0;
    for (int part = 0; part < 4; ++part) parts |= ((difference >> (4 * part)) & 0xf) != 0 ? 1 << part : 0;
    return parts;
  };
  EXPECT_EQ(differing([](auto& position, auto&, auto&) { position.samples_drawn = 50; }), 0);
  EXPECT_EQ(differing([](auto& position, auto&, auto&) { position.seed = 2; }), 1);
  EXPECT_EQ(differing([](auto& position, auto&, auto&) { position.epoch = 3; }), 2);
  EXPECT_EQ(differing([](auto&, auto& batch_size, auto&) { batch_size = 5; }), 4);
  EXPECT_EQ(differing([](auto& position, auto&, auto&) { position.num_samples = 101; }), 8);
  EXPECT_EQ(differing([](auto& position, auto&, auto&) { position.shuffle = false; }), 8);
  EXPECT_EQ(differing([](auto&, auto&, auto& mode) { mode = ShardMode::kDrop; }), 8);
  EXPECT_EQ(differing([](auto& position, auto& batch_size, auto&) { position.seed = 2, batch_size = 5; }), 5);
}

}  // namespace
}  // namespace lockstep::data
