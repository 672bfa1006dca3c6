#include "lockstep/comm/channel/call_signature.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::comm {
namespace {

Collective reduce_call() { return {.kind = Kind::kReduce, .name = "loss", .op = ReduceOp::kMax, .root = 2, .seq = 7}; }
Call base_call() { return make_call(reduce_call(), CallShape(at::zeros({64, 3}))); }

TEST(Call, SaysWhatWasCalled) {
  EXPECT_EQ(describe(base_call()), "reduce(loss: float32[64,3], root 2, max)");
  EXPECT_EQ(describe(make_call({.kind = Kind::kAllReduce}, CallShape(at::zeros({1024})))), "all_reduce(float32[1024])");
  EXPECT_EQ(
      describe(make_call({.kind = Kind::kAllReduce, .op = ReduceOp::kMean}, CallShape(at::zeros({}, at::kDouble)))),
      "all_reduce(float64[], mean)");
  EXPECT_EQ(describe(make_call({.kind = Kind::kBroadcast, .root = 1}, CallShape(at::zeros({0}, at::kBool)))),
            "broadcast(bool[0], root 1)");
  EXPECT_EQ(describe(make_call({.kind = Kind::kBarrier}, {})), "barrier()");
  EXPECT_EQ(describe(make_call({.kind = Kind::kBarrier, .name = "end"}, {})), "barrier(end)");
  EXPECT_EQ(
      describe(make_call({.kind = Kind::kSend, .op = ReduceOp::kMax, .root = 1}, CallShape(at::zeros({2}, at::kHalf)))),
      "send(float16[2])");
}

TEST(Call, LabelsNameAndNumber) {
  EXPECT_EQ(label(reduce_call()), "reduce(loss)#7");
  EXPECT_EQ(label({.kind = Kind::kAllToAll, .seq = 1}), "all_to_all#1");
}

TEST(Call, EveryKindOperatorAndDtypeHasAName) {
  for (int kind = 0; kind <= static_cast<int>(Kind::kBarrier); ++kind)
    EXPECT_FALSE(name(static_cast<Kind>(kind)).empty());
  EXPECT_EQ(name(Kind::kBarrier), "barrier");
  EXPECT_EQ(name(Kind::kReduceScatter), "reduce_scatter");
  EXPECT_EQ(name(ReduceOp::kProduct), "product");
  EXPECT_EQ(name(at::kBFloat16), "bfloat16");
  EXPECT_EQ(name(at::kComplexFloat), "?");
}

TEST(Call, EveryDifferenceCounts) {
  const auto differs = [](const Call& other, bool sizes_may_differ = false) {
    Difference difference{-1, -1};
    const bool found = find_difference({base_call(), base_call(), other}, sizes_may_differ, difference);
    EXPECT_TRUE(!found || (difference.odd == 2 && difference.other == 0));
    if (!sizes_may_differ) {
      EXPECT_EQ(key(other) != key(base_call()), found) << describe(other);
    }
    return found;
  };
  const auto with = [](auto change, at::Tensor tensor = at::zeros({64, 3})) {
    Collective op = reduce_call();
    change(op);
    return make_call(op, CallShape(tensor));
  };
  const auto nothing = [](Collective&) {};
  EXPECT_FALSE(differs(with(nothing)));
  EXPECT_TRUE(differs(with([](Collective& op) { op.kind = Kind::kBroadcast; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.op = ReduceOp::kMin; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.root = 1; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.wire = at::kBFloat16; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.seq = 8; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.name = "los"; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.name = ""; })));
  EXPECT_TRUE(differs(with(nothing, at::zeros({64, 3}, at::kDouble))));
  EXPECT_TRUE(differs(with(nothing, at::zeros({3, 64}))));
  EXPECT_TRUE(differs(with(nothing, at::zeros({64, 3, 1}))));
  EXPECT_FALSE(differs(with(nothing, at::zeros({5})), true));
  EXPECT_TRUE(differs(with(nothing, at::zeros({5}, at::kInt)), true));
}

TEST(Call, NamesBeyondWhatTravelsAreComparedToo) {
  const std::string longer(500, 'x');
  const Call a = make_call({.kind = Kind::kBarrier, .name = longer + "a"}, {});
  const Call b = make_call({.kind = Kind::kBarrier, .name = longer + "b"}, {});
  EXPECT_EQ(describe(a), describe(b));
  EXPECT_EQ(describe(a), "barrier(" + std::string(Call::kNameBytes - 1, 'x') + ")");
  Difference difference{};
  EXPECT_TRUE(find_difference({a, b}, false, difference));
}

TEST(Call, ANameIsCutBetweenCharacters) {
  Collective op;
  op.name.assign(Call::kNameBytes - 2, 'x').append("éé");
  EXPECT_EQ(describe(make_call(op, {})), "barrier(" + std::string(Call::kNameBytes - 2, 'x') + ")");
}

TEST(Call, TheMajorityIsRight) {
  const Call a = base_call();
  Call b = base_call();
  b.root = 5;
  const auto odd = [](const std::vector<Call>& calls) {
    Difference difference{-1, -1};
    return find_difference(calls, false, difference) ? std::pair(difference.odd, difference.other) : std::pair(-1, -1);
  };
  EXPECT_EQ(odd({a}), std::pair(-1, -1));
  EXPECT_EQ(odd({a, a, a}), std::pair(-1, -1));
  EXPECT_EQ(odd({a, b}), std::pair(1, 0));
  EXPECT_EQ(odd({a, b, b}), std::pair(0, 1));
  EXPECT_EQ(odd({a, a, b}), std::pair(2, 0));
  EXPECT_EQ(odd({a, b, a, a}), std::pair(1, 0));
  EXPECT_EQ(odd({a, b, b, a}), std::pair(1, 0));
}

}  // namespace
}  // namespace lockstep::comm
