// Tests loaders that copy batches to GPUs. The GPUs are fakes (tests/support/gpu): each operation on a stream takes
// some time, and streams run independently, so that a missing wait for a copy, or memory that is reused too early,
// causes wrong values.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "lockstep/data/loader.h"
#include "tests/support/rank_main.h"
#include "tests/support/temp_dir.h"

namespace lockstep::data::data_gpu_test {
namespace {

using ::testing::HasSubstr;
using tests::world;

constexpr std::int64_t kWidth = 4096;
constexpr std::int64_t kBatchBytes = 4 * kWidth * 4 + 512;  // four samples and, rounded up, their targets

/// Sample i has data [i, i, ...] and target i.
struct IndexDataset {
  std::shared_ptr<std::atomic<int>> made = std::make_shared<std::atomic<int>>(0);
  std::size_t count = 40;
  std::size_t broken = 1000;

  Example get(std::size_t i) const {
    ++*made;
    if (i == broken) throw std::runtime_error("cannot read it");
    return {torch::full({kWidth}, static_cast<float>(i)), torch::tensor(static_cast<std::int64_t>(i))};
  }
  std::uint64_t size() const { return count; }
};

LoaderOptions options(int num_workers, at::Device device) {
  return {.batch_size = 4, .seed = 3, .num_workers = num_workers, .device = device};
}

/// Returns clones of all batches, without synchronizing in between.
template <typename Batches>
std::vector<Example> collect_batches(Batches&& batches) {
  std::vector<Example> all;
  for (auto& batch : batches) all.push_back({batch.data.clone(), batch.target.clone()});
  return all;
}

void expect_same(const std::vector<Example>& found, const std::vector<Example>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].data.device(), world().device());
    EXPECT_TRUE(found[i].target.cpu().equal(expected[i].target))
        << i << ": " << found[i].target.cpu() << expected[i].target;
    EXPECT_TRUE(found[i].data.cpu().equal(expected[i].data)) << i;
  }
}

c10::CachingAllocator::Stat device_bytes() {
  return c10::getDeviceAllocator(at::kCUDA)->getDeviceStats(world().device().index()).allocated_bytes[0];
}

TEST(DataGpu, SameBatchesInSameOrderAsOnCpu) {
  for (const int workers : {0, 1, 3}) {
    auto host = make_loader(IndexDataset(), world(), options(workers, at::kCPU)),
         gpu = make_loader(IndexDataset(), world(), options(workers, world().device()));
    for (const std::uint64_t epoch : {0, 1}) {
      const auto expected = collect_batches(host.epoch(epoch));
      expect_same(collect_batches(gpu.epoch(epoch)), expected);
      EXPECT_EQ(gpu.position(), host.position());
    }
  }
}

TEST(DataGpu, PrefetchesExactlyOneBatch) {
  const std::int64_t before = device_bytes().current;
  c10::getDeviceAllocator(at::kCUDA)->resetPeakStats(world().device().index());
  IndexDataset numbers;
  auto loader = make_loader(numbers, DataShard{}, options(0, world().device()));
  int drawn = 0;
  for (auto& batch : loader.epoch(0)) {
    ++drawn;
    EXPECT_EQ(batch.data.device(), world().device());
    const int on_device = std::min(drawn + 1, 10) - drawn + 1;
    EXPECT_EQ(*numbers.made, 4 * std::min(drawn + 1, 10));
    EXPECT_EQ(device_bytes().current - before, on_device * kBatchBytes);
    EXPECT_EQ(loader.position().samples_drawn, static_cast<std::uint64_t>(4 * drawn));
  }
  EXPECT_EQ(drawn, 10);
  EXPECT_EQ(device_bytes().current, before);
  EXPECT_LE(device_bytes().peak - before, 2 * kBatchBytes);
}

TEST(DataGpu, MemoryIsReusedOnlyAfterItsConsumers) {
  auto loader = make_loader(IndexDataset{.count = 160}, DataShard{}, options(3, world().device()));
  auto expected = collect_batches(make_loader(IndexDataset{.count = 160}, DataShard{}, options(0, at::kCPU)).epoch(0));
  std::vector<Example> found;
  for (auto& batch : loader.epoch(0)) {
    at::Tensor late;
    for (int i = 0; i < 10; ++i) late = batch.data.clone();  // so that this stream lags behind the stream of the copies
    found.push_back({late, batch.target.clone()});
  }
  expect_same(found, expected);
}

TEST(DataGpu, MemoryIsBoundedWithoutSynchronization) {
  auto loader = make_loader(IndexDataset{.count = 320}, DataShard{}, options(1, world().device()));
  const std::int64_t before = device_bytes().current;
  c10::getDeviceAllocator(at::kCUDA)->resetPeakStats(world().device().index());
  std::uint64_t num_batches = 0;
  for (const std::uint64_t epoch : {0, 1}) {
    at::Tensor work;
    auto batches = loader.epoch(epoch);
    num_batches += batches.size();
    for (auto& batch : batches)
      for (int i = 0; i < 5; ++i) work = batch.data.clone();
  }
  EXPECT_LE(device_bytes().peak - before, 6 * kBatchBytes);  // three batches, and two of the clones made here
  // How many blocks are in use depends on how far the device lags behind; without reuse there would be two per batch.
  const auto pinned_blocks = static_cast<std::uint64_t>(at::getHostAllocator(at::kCUDA)->get_stats().num_host_alloc);
  EXPECT_GT(pinned_blocks, 0u);
  EXPECT_LE(pinned_blocks, num_batches / 2);
}

TEST(DataGpu, WorksOnAnyCurrentStream) {
  auto loader = make_loader(IndexDataset(), DataShard{}, options(1, world().device()));
  const auto expected = collect_batches(make_loader(IndexDataset(), DataShard{}, options(0, at::kCPU)).epoch(0));
  const c10::StreamGuard guard(c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(world().device()));
  expect_same(collect_batches(loader.epoch(0)), expected);
}

TEST(DataGpu, ResumesInsideEpoch) {
  for (const int workers : {0, 2}) {
    checkpoint::StateDict position;
    auto first = make_loader(IndexDataset(), world(), options(workers, world().device()));
    int drawn = 0;
    for (auto& batch : first.epoch(1)) {
      EXPECT_TRUE(batch.data.defined());
      if (++drawn < 3) continue;
      position = first.state_dict();
      break;
    }
    auto host = make_loader(IndexDataset(), world(), options(0, at::kCPU)),
         gpu = make_loader(IndexDataset(), world(), options(workers, world().device()));
    host.load_state_dict(position);
    gpu.load_state_dict(position);
    const auto expected = collect_batches(host.epoch(1));
    expect_same(collect_batches(gpu.epoch(1)), expected);
    // The loader whose epoch was abandoned continues with another epoch.
    const auto other = collect_batches(host.epoch(2));
    expect_same(collect_batches(first.epoch(2)), other);
  }
}

TEST(DataGpu, BreakFreesDeviceMemory) {
  const std::int64_t before = device_bytes().current;
  for (const int workers : {0, 3}) {
    auto loader = make_loader(IndexDataset(), DataShard{}, options(workers, world().device()));
    for (auto& batch : loader.epoch(0)) {
      EXPECT_TRUE(batch.data.defined());
      break;
    }
    EXPECT_EQ(device_bytes().current, before);
  }
}

TEST(DataGpu, SampleErrorIsThrownInOrder) {
  for (const int workers : {0, 2}) {
    IndexDataset numbers;
    numbers.broken = 13;
    LoaderOptions in_order = options(workers, world().device());
    in_order.shuffle = false;
    auto loader = make_loader(numbers, DataShard{}, in_order);
    std::vector<Example> found;
    const auto error = tests::thrown<SampleError>([&] {
      for (auto& batch : loader.epoch(0)) found.push_back({batch.data.clone(), batch.target.clone()});
    });
    EXPECT_EQ(error.index(), 13u);
    EXPECT_THAT(error.what(), HasSubstr("sample 13: cannot read it"));
    ASSERT_EQ(found.size(), 3u);
    EXPECT_EQ(loader.position().samples_drawn, 12u);
    EXPECT_EQ(found[2].target.cpu()[3].item<std::int64_t>(), 11);
  }
}

/// A batch of a user's type: only its tensors are copied to the device.
struct CustomBatch {
  std::string name;
  std::vector<std::pair<int, at::Tensor>> lines;
  std::map<std::string, at::Tensor> notes;
  at::Tensor undefined;
  void for_each_tensor(const TensorVisitor& visit) {
    visit_tensors(lines, visit);
    visit_tensors(notes, visit);
    visit(undefined);
  }
};
struct CustomBatchDataset {
  CustomBatch get_batch(const std::vector<std::size_t>& indices) const {
    const auto first = static_cast<float>(indices.front());
    return {"page",
            {{7, torch::full({3}, first)}, {8, torch::full({2}, first + 1)}},
            {{"left", torch::full({1}, first + 2)}},
            {}};
  }
  std::uint64_t size() const { return 4; }
};

TEST(DataGpu, CustomBatchTypes) {
  auto custom_batches =
      make_loader(CustomBatchDataset(), DataShard{}, {.batch_size = 2, .shuffle = false, .device = world().device()});
  float first = 0;
  for (CustomBatch& custom_batch : custom_batches.epoch(0)) {
    EXPECT_EQ(custom_batch.name, "page");
    EXPECT_EQ(custom_batch.lines[1].first, 8);
    EXPECT_TRUE(custom_batch.lines[0].second.is_cuda() && custom_batch.lines[1].second.is_cuda() &&
                custom_batch.notes["left"].is_cuda());
    EXPECT_TRUE(custom_batch.lines[1].second.cpu().equal(torch::full({2}, first + 1)));
    EXPECT_TRUE(custom_batch.notes["left"].cpu().equal(torch::full({1}, first + 2)));
    EXPECT_FALSE(custom_batch.undefined.defined());
    first += 2;
  }
  auto tensors = make_loader(6, [](std::size_t i) { return torch::full({2}, static_cast<float>(i)); }, DataShard{},
                             {.batch_size = 3, .shuffle = false, .device = at::kCUDA});
  for (at::Tensor& batch : tensors.epoch(0)) EXPECT_EQ(batch.device(), world().device());
  auto pairs = make_loader(
      6, [](std::size_t i) { return std::tuple(static_cast<int>(i), torch::full({2}, static_cast<float>(i))); },
      DataShard{}, {.batch_size = 3, .shuffle = false, .device = world().device()});
  for (auto& batch : pairs.epoch(0)) EXPECT_TRUE(std::get<1>(batch[2]).is_cuda());
}

TEST(DataGpu, InvalidDeviceIsRejected) {
  const auto message = [](at::Device device) {
    return tests::message_of<base::UsageError>([&] { make_loader(IndexDataset(), DataShard{}, options(0, device)); });
  };
  EXPECT_THAT(message(at::Device(at::kCUDA, 9)), HasSubstr("LoaderOptions.device is cuda:9, but this process has "));
  EXPECT_THAT(message(at::kMeta),
              HasSubstr("LoaderOptions.device is meta, which is not an accelerator; expected cpu or Group::device()"));
}

}  // namespace
}  // namespace lockstep::data::data_gpu_test
