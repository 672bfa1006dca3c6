#include "lockstep/ddp/hooks/bf16_compress_hook.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace lockstep::ddp {
namespace {

/// Sums over two ranks that pass equal tensors.
class TwoEqualRanks final : public comm::HookContext {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  comm::PendingPtr all_reduce(const at::Tensor& tensor) override {
    sent = tensor.clone();
    memory = tensor.const_data_ptr();
    tensor.mul_(2);
    return comm::make_finished_pending();
  }
  comm::PendingPtr all_gather(const at::Tensor&, const at::Tensor&) override {
    ADD_FAILURE() << "all_gather() called";
    return comm::make_finished_pending();
  }
  void wait(comm::Pending&) override { ADD_FAILURE() << "wait() called"; }

  at::Tensor sent;
  const void* memory = nullptr;
};

comm::Bucket make_bucket(std::size_t index, const at::Tensor& values) {
  return {.index = index,
          .names = {"w"},
          .shapes = {values.sizes().vec()},
          .strides = {values.strides().vec()},
          .offsets = {0},
          .buffer = values.clone()};
}

TEST(Bf16CompressHook, SendsWideDtypesAsBfloat16) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor values = torch::randn({100}, dtype);
    comm::Bucket bucket = make_bucket(0, values);
    Bf16CompressHook hook;
    TwoEqualRanks context;
    hook.buckets_changed({bucket});
    EXPECT_TRUE(hook.start(bucket, context)->done());
    EXPECT_EQ(context.sent.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(torch::equal(context.sent, values.to(at::kBFloat16)));
    EXPECT_TRUE(torch::equal(bucket.buffer, values)) << "the bucket changes only when the sum has arrived";
    hook.finish(bucket, context);
    EXPECT_EQ(bucket.buffer.scalar_type(), dtype);
    EXPECT_TRUE(torch::equal(bucket.buffer, (values.to(at::kBFloat16) * 2).to(dtype)));
  }
}

TEST(Bf16CompressHook, SendsHalfDtypesAsTheyAre) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor values = torch::randn({100}).to(dtype);
    comm::Bucket bucket = make_bucket(0, values);
    Bf16CompressHook hook;
    TwoEqualRanks context;
    hook.buckets_changed({bucket});
    hook.start(bucket, context);
    EXPECT_EQ(context.memory, bucket.buffer.const_data_ptr());
    hook.finish(bucket, context);
    EXPECT_TRUE(torch::equal(bucket.buffer, values * 2));
  }
}

TEST(Bf16CompressHook, KeepsItsMemoryUntilTheBucketsChange) {
  std::vector<comm::Bucket> buckets = {make_bucket(0, torch::randn({8})), make_bucket(1, torch::randn({4}))};
  Bf16CompressHook hook;
  TwoEqualRanks context;
  hook.buckets_changed(buckets);
  hook.start(buckets[0], context);
  const void* const first = context.memory;
  hook.start(buckets[1], context);
  EXPECT_NE(context.memory, first);
  hook.finish(buckets[0], context);
  hook.finish(buckets[1], context);
  hook.start(buckets[0], context);
  EXPECT_EQ(context.memory, first);
  hook.finish(buckets[0], context);

  std::vector<comm::Bucket> merged = {make_bucket(0, torch::randn({12}))};
  hook.buckets_changed(merged);
  hook.start(merged[0], context);
  EXPECT_EQ(context.sent.numel(), 12);
}

}  // namespace
}  // namespace lockstep::ddp
