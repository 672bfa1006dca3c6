#include "lockstep/comm/channel/call_signature.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::comm::channel {
namespace {

Collective reduce_call() {
  return {.kind = CollectiveKind::kReduce, .name = "loss", .op = ReduceOp::kMax, .root = 2, .seq = 7};
}
CallSignature base_call() { return make_signature(reduce_call(), SignatureShape(at::zeros({64, 3}))); }

TEST(CallSignature, DescribesTheCall) {
  EXPECT_EQ(describe(base_call()), "reduce(loss: float32[64,3], root 2, max)");
  EXPECT_EQ(describe(make_signature({.kind = CollectiveKind::kAllReduce}, SignatureShape(at::zeros({1024})))),
            "all_reduce(float32[1024])");
  EXPECT_EQ(describe(make_signature({.kind = CollectiveKind::kAllReduce, .op = ReduceOp::kMean},
                                    SignatureShape(at::zeros({}, at::kDouble)))),
            "all_reduce(float64[], mean)");
  EXPECT_EQ(describe(make_signature({.kind = CollectiveKind::kBroadcast, .root = 1},
                                    SignatureShape(at::zeros({0}, at::kBool)))),
            "broadcast(bool[0], root 1)");
  EXPECT_EQ(describe(make_signature({.kind = CollectiveKind::kBarrier}, {})), "barrier()");
  EXPECT_EQ(describe(make_signature({.kind = CollectiveKind::kBarrier, .name = "end"}, {})), "barrier(end)");
  EXPECT_EQ(describe(make_signature({.kind = CollectiveKind::kSend, .op = ReduceOp::kMax, .root = 1},
                                    SignatureShape(at::zeros({2}, at::kHalf)))),
            "send(float16[2])");
}

TEST(CallSignature, LabelHasNameAndNumber) {
  EXPECT_EQ(label(reduce_call()), "reduce(loss)#7");
  EXPECT_EQ(label({.kind = CollectiveKind::kAllToAll, .seq = 1}), "all_to_all#1");
}

TEST(CallSignature, EveryKindOpAndDtypeHasAName) {
  for (int kind = 0; kind <= static_cast<int>(CollectiveKind::kBarrier); ++kind)
    EXPECT_FALSE(name(static_cast<CollectiveKind>(kind)).empty());
  EXPECT_EQ(name(CollectiveKind::kBarrier), "barrier");
  EXPECT_EQ(name(CollectiveKind::kReduceScatter), "reduce_scatter");
  EXPECT_EQ(name(ReduceOp::kProduct), "product");
  EXPECT_EQ(name(at::kBFloat16), "bfloat16");
  EXPECT_EQ(name(at::kComplexFloat), "?");
}

TEST(CallSignature, EveryFieldIsCompared) {
  const auto differs = [](const CallSignature& other, bool sizes_may_differ = false) {
    CallMismatch difference{-1, -1};
    const bool found = find_mismatch({base_call(), base_call(), other}, sizes_may_differ, difference);
    EXPECT_TRUE(!found || (difference.suspect == 2 && difference.other == 0));
    if (!sizes_may_differ) {
      EXPECT_EQ(hash_signature(other) != hash_signature(base_call()), found) << describe(other);
    }
    return found;
  };
  const auto with = [](auto change, at::Tensor tensor = at::zeros({64, 3})) {
    Collective op = reduce_call();
    change(op);
    return make_signature(op, SignatureShape(tensor));
  };
  const auto nothing = [](Collective&) {};
  EXPECT_FALSE(differs(with(nothing)));
  EXPECT_TRUE(differs(with([](Collective& op) { op.kind = CollectiveKind::kBroadcast; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.op = ReduceOp::kMin; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.root = 1; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.wire_dtype = at::kBFloat16; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.seq = 8; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.name = "los"; })));
  EXPECT_TRUE(differs(with([](Collective& op) { op.name = ""; })));
  EXPECT_TRUE(differs(with(nothing, at::zeros({64, 3}, at::kDouble))));
  EXPECT_TRUE(differs(with(nothing, at::zeros({3, 64}))));
  EXPECT_TRUE(differs(with(nothing, at::zeros({64, 3, 1}))));
  EXPECT_FALSE(differs(with(nothing, at::zeros({5})), true));
  EXPECT_TRUE(differs(with(nothing, at::zeros({5}, at::kInt)), true));
}

TEST(CallSignature, TruncatedNamesAreComparedByHash) {
  const std::string longer(500, 'x');
  const CallSignature a = make_signature({.kind = CollectiveKind::kBarrier, .name = longer + "a"}, {});
  const CallSignature b = make_signature({.kind = CollectiveKind::kBarrier, .name = longer + "b"}, {});
  EXPECT_EQ(describe(a), describe(b));
  EXPECT_EQ(describe(a), "barrier(" + std::string(CallSignature::kNameBytes - 1, 'x') + ")");
  CallMismatch difference{};
  EXPECT_TRUE(find_mismatch({a, b}, false, difference));
}

TEST(CallSignature, NameIsTruncatedAtACharacterBoundary) {
  Collective op;
  op.name.assign(CallSignature::kNameBytes - 2, 'x').append("éé");
  EXPECT_EQ(describe(make_signature(op, {})), "barrier(" + std::string(CallSignature::kNameBytes - 2, 'x') + ")");
}

TEST(CallSignature, SuspectIsTheMinority) {
  const CallSignature a = base_call();
  CallSignature b = base_call();
  b.root = 5;
  const auto suspect = [](const std::vector<CallSignature>& calls) {
    CallMismatch difference{-1, -1};
    return find_mismatch(calls, false, difference) ? std::pair(difference.suspect, difference.other)
                                                   : std::pair(-1, -1);
  };
  EXPECT_EQ(suspect({a}), std::pair(-1, -1));
  EXPECT_EQ(suspect({a, a, a}), std::pair(-1, -1));
  EXPECT_EQ(suspect({a, b}), std::pair(1, 0));
  EXPECT_EQ(suspect({a, b, b}), std::pair(0, 1));
  EXPECT_EQ(suspect({a, a, b}), std::pair(2, 0));
  EXPECT_EQ(suspect({a, b, a, a}), std::pair(1, 0));
  EXPECT_EQ(suspect({a, b, b, a}), std::pair(1, 0));
}

}  // namespace
}  // namespace lockstep::comm::channel
