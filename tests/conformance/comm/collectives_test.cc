// Tests each operation of a group with all dtypes and layouts, against a reference that each rank computes itself.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "tests/support/rank_main.h"

namespace lockstep::tests::collectives_test {
namespace {

using comm::Group;
using comm::ReduceOp;
using comm::Work;

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                                      at::kInt,    at::kChar,  at::kByte, at::kBool};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
enum class Layout { kContiguous, kTransposed, kStrided, kScalar, kEmpty };
constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kTransposed, Layout::kStrided, Layout::kScalar,
                               Layout::kEmpty};
constexpr const char* kLayoutNames[] = {"contiguous", "transposed", "strided", "0-dim", "empty"};

/// Returns the shape of one rank's part, or of `parts` of them concatenated.
std::vector<std::int64_t> shape_of(Layout layout, int parts = 1) {
  if (layout == Layout::kScalar) return parts == 1 ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{parts};
  return {layout == Layout::kEmpty ? 0 : 3 * parts, 5};
}

/// Returns the input of rank `rank`: small numbers, so that sums and products are exact in every dtype.
at::Tensor values(int rank, at::ScalarType dtype, const std::vector<std::int64_t>& shape, int salt = 0) {
  at::Tensor flat = at::arange(at::IntArrayRef(shape).empty() ? 1 : c10::multiply_integers(shape), at::kLong);
  flat = (flat * 7 + rank * 5 + salt * 3) % 4;  // 0 to 3
  if (dtype == at::kBool) return flat.eq(1).view(shape);
  if (dtype != at::kByte) flat = flat.sub(1);  // -1 to 2
  return flat.to(dtype).view(shape);
}

/// Returns the same numbers in another memory layout. The gaps between elements of a strided tensor contain 99.
at::Tensor with_layout(const at::Tensor& tensor, Layout layout) {
  if (layout == Layout::kTransposed) {
    at::Tensor transposed_view = at::empty({tensor.size(1), tensor.size(0)}, tensor.options()).t();
    return transposed_view.copy_(tensor);
  }
  if (layout == Layout::kStrided) {
    at::Tensor wide = at::full({tensor.size(0), 2 * tensor.size(1)}, 99, tensor.options());
    return wide.slice(1, 0, wide.size(1), 2).copy_(tensor);
  }
  return tensor.clone();
}

/// Returns an output tensor for `parts` parts, filled with a value that no operation computes.
at::Tensor make_output(at::ScalarType dtype, Layout layout, int parts) {
  return with_layout(at::full(shape_of(layout, parts), dtype == at::kBool ? 0 : 77, dtype), layout);
}

bool gaps_unchanged(const at::Tensor& tensor, Layout layout) {
  if (layout != Layout::kStrided) return true;
  const at::Tensor gaps = tensor.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset() + 1);
  return gaps.eq(at::full({}, 99, tensor.options())).all().item<bool>();
}

at::Tensor expected_reduction(ReduceOp op, const std::vector<at::Tensor>& all) {
  const at::Tensor stack = at::stack(all);
  if (stack.scalar_type() == at::kBool)
    return op == ReduceOp::kProduct || op == ReduceOp::kMin ? stack.all(0) : stack.any(0);
  const at::Tensor exact = stack.to(at::kDouble);
  switch (op) {
    case ReduceOp::kMin: return exact.amin(0).to(stack.scalar_type());
    case ReduceOp::kMax: return exact.amax(0).to(stack.scalar_type());
    case ReduceOp::kProduct: return exact.prod(0).to(stack.scalar_type());
    case ReduceOp::kMean: return exact.sum(0).to(stack.scalar_type()).div(static_cast<double>(all.size()));
    default: return exact.sum(0).to(stack.scalar_type());
  }
}

std::vector<at::Tensor> all_values(at::ScalarType dtype, const std::vector<std::int64_t>& shape, int salt = 0) {
  std::vector<at::Tensor> all;
  for (int r = 0; r < world().size(); ++r) all.push_back(values(r, dtype, shape, salt));
  return all;
}

/// Calls `check` for each dtype and layout, and for the blocking and the asynchronous form.
void for_each_case(const std::function<void(at::ScalarType, Layout, bool)>& check) {
  for (const at::ScalarType dtype : kDtypes)
    for (const Layout layout : kLayouts)
      for (const bool async : {false, true}) {
        SCOPED_TRACE(std::string(comm::name(dtype)) + " " + kLayoutNames[static_cast<int>(layout)] +
                     (async ? " async" : " sync"));
        check(dtype, layout, async);
      }
}

/// Returns the roots to test: all ranks, or for the asynchronous form only the last one.
std::vector<int> roots(bool async) {
  std::vector<int> all;
  for (int r = async ? world().size() - 1 : 0; r < world().size(); ++r) all.push_back(r);
  return all;
}

void expect_same(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_EQ(got.sizes(), expected.sizes());
  EXPECT_TRUE(at::equal(got, expected)) << "got\n" << got << "\nexpected\n" << expected;
}

TEST(Collectives, AllReduce) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::kMean && !at::isFloatingType(dtype)) continue;
      const at::Tensor mine = with_layout(values(world().rank(), dtype, shape_of(layout)), layout);
      if (async)
        world().all_reduce_async(mine, op).wait();
      else
        world().all_reduce(mine, op);
      expect_same(mine, expected_reduction(op, all_values(dtype, shape_of(layout))));
      EXPECT_TRUE(gaps_unchanged(mine, layout));
    }
  });
}

TEST(Collectives, Reduce) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    for (const int root : roots(async)) {
      const ReduceOp op = root == 0 ? ReduceOp::kSum : ReduceOp::kMax;
      const at::Tensor mine = with_layout(values(world().rank(), dtype, shape_of(layout), root), layout);
      if (async)
        world().reduce_async(mine, root, op).wait();
      else
        world().reduce(mine, root, op);
      if (world().rank() == root) expect_same(mine, expected_reduction(op, all_values(dtype, shape_of(layout), root)));
    }
  });
}

TEST(Collectives, ReduceMean) {
  for (int root = 0; root < world().size(); ++root) {
    const at::Tensor mine = values(world().rank(), at::kFloat, {4});
    world().reduce(mine, root, ReduceOp::kMean);
    if (world().rank() == root) expect_same(mine, expected_reduction(ReduceOp::kMean, all_values(at::kFloat, {4})));
  }
}

TEST(Collectives, Broadcast) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    for (const int root : roots(async)) {
      const at::Tensor mine = with_layout(values(world().rank(), dtype, shape_of(layout), root), layout);
      if (async)
        world().broadcast_async(mine, root).wait();
      else
        world().broadcast(mine, root);
      expect_same(mine, values(root, dtype, shape_of(layout), root));
      EXPECT_TRUE(gaps_unchanged(mine, layout));
    }
  });
}

TEST(Collectives, AllGather) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    const at::Tensor mine = with_layout(values(world().rank(), dtype, shape_of(layout)), layout);
    const at::Tensor all = make_output(dtype, layout, world().size());
    if (async)
      world().all_gather_async(all, mine).wait();
    else
      world().all_gather(all, mine);
    expect_same(all.reshape({-1}), at::stack(all_values(dtype, shape_of(layout))).reshape({-1}));
    EXPECT_TRUE(gaps_unchanged(all, layout));
    expect_same(mine, values(world().rank(), dtype, shape_of(layout)));
  });
}

TEST(Collectives, ReduceScatter) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::kMean && !at::isFloatingType(dtype)) continue;
      const auto whole = shape_of(layout, world().size());
      const at::Tensor input = with_layout(values(world().rank(), dtype, whole), layout);
      const at::Tensor part = make_output(dtype, layout, 1);
      if (async)
        world().reduce_scatter_async(part, input, op).wait();
      else
        world().reduce_scatter(part, input, op);
      const at::Tensor sum = expected_reduction(op, all_values(dtype, whole)).reshape({-1});
      expect_same(part.reshape({-1}), sum.narrow(0, world().rank() * part.numel(), part.numel()));
      EXPECT_TRUE(gaps_unchanged(part, layout));
      expect_same(input, values(world().rank(), dtype, whole));
    }
  });
}

TEST(Collectives, Gather) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    for (const int root : roots(async)) {
      const at::Tensor mine = with_layout(values(world().rank(), dtype, shape_of(layout), root), layout);
      const at::Tensor all = world().rank() == root ? make_output(dtype, layout, world().size()) : at::Tensor();
      if (async)
        world().gather_async(all, mine, root).wait();
      else
        world().gather(all, mine, root);
      if (world().rank() != root) continue;
      expect_same(all.reshape({-1}), at::stack(all_values(dtype, shape_of(layout), root)).reshape({-1}));
      EXPECT_TRUE(gaps_unchanged(all, layout));
    }
  });
}

TEST(Collectives, Scatter) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    for (const int root : roots(async)) {
      const auto whole = shape_of(layout, world().size());
      const at::Tensor input = world().rank() == root ? with_layout(values(root, dtype, whole), layout) : at::Tensor();
      const at::Tensor part = make_output(dtype, layout, 1);
      if (async)
        world().scatter_async(part, input, root).wait();
      else
        world().scatter(part, input, root);
      expect_same(part.reshape({-1}),
                  values(root, dtype, whole).reshape({-1}).narrow(0, world().rank() * part.numel(), part.numel()));
      EXPECT_TRUE(gaps_unchanged(part, layout));
    }
  });
}

TEST(Collectives, AllToAll) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    const auto whole = shape_of(layout, world().size());
    const at::Tensor input = with_layout(values(world().rank(), dtype, whole), layout);
    const at::Tensor output = make_output(dtype, layout, world().size());
    if (async)
      world().all_to_all_async(output, input).wait();
    else
      world().all_to_all(output, input);
    const std::int64_t part = input.numel() / world().size();
    std::vector<at::Tensor> parts;
    for (const at::Tensor& theirs : all_values(dtype, whole))
      parts.push_back(theirs.reshape({-1}).narrow(0, world().rank() * part, part));
    expect_same(output.reshape({-1}), at::cat(parts));
    EXPECT_TRUE(gaps_unchanged(output, layout));
  });
}

TEST(Collectives, AllGatherUnequal) {
  for_each_case([](at::ScalarType dtype, Layout layout, bool async) {
    // Rank r has r rows (rank 0 none), except for layouts with a fixed shape.
    const auto shape = [&](int rank) {
      return layout == Layout::kScalar || layout == Layout::kEmpty ? shape_of(layout)
                                                                   : std::vector<std::int64_t>{rank, 2};
    };
    const at::Tensor mine = with_layout(values(world().rank(), dtype, shape(world().rank())), layout);
    std::vector<at::Tensor> all;
    if (async)
      world().all_gather_unequal_async(all, mine).wait();
    else
      all = world().all_gather_unequal(mine);
    ASSERT_EQ(all.size(), static_cast<std::size_t>(world().size()));
    for (int r = 0; r < world().size(); ++r) expect_same(all[static_cast<std::size_t>(r)], values(r, dtype, shape(r)));
  });
}

TEST(Collectives, AllGatherUnequalOfDifferentDimensions) {
  // The part of rank r has r dimensions.
  const auto shape = [](int rank) { return std::vector<std::int64_t>(static_cast<std::size_t>(rank), 2); };
  const auto all = world().all_gather_unequal(values(world().rank(), at::kInt, shape(world().rank())));
  for (int r = 0; r < world().size(); ++r) expect_same(all[static_cast<std::size_t>(r)], values(r, at::kInt, shape(r)));
}

TEST(Collectives, BroadcastAndGatherBytes) {
  for (int root = 0; root < world().size(); ++root)
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{1} << 20}) {
      std::string text(size, '\0');
      for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 31 + static_cast<std::size_t>(root));
      EXPECT_EQ(world().broadcast_bytes(world().rank() == root ? text : "ignored", root), text);
    }
  const auto bytes = [](int rank) {
    return std::string(static_cast<std::size_t>(rank) * 1000, static_cast<char>('a' + rank));
  };
  const auto all = world().all_gather_bytes(bytes(world().rank()));
  ASSERT_EQ(all.size(), static_cast<std::size_t>(world().size()));
  for (int r = 0; r < world().size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], bytes(r));
  EXPECT_THAT(world().all_gather_bytes(""), ::testing::Each(""));
}

TEST(Collectives, AllRanksHoldTheSameBits) {
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(world().rank()) + 1);
  for (const std::int64_t count : {1, 1000, 2 << 20}) {
    const at::Tensor mine = at::randn({count}, generator);
    world().all_reduce(mine, ReduceOp::kMean);
    const at::Tensor bytes = mine.view(at::kByte);
    const at::Tensor all = at::empty({world().size(), bytes.numel()}, at::kByte);
    world().all_gather(all, bytes);
    for (int r = 0; r < world().size(); ++r) EXPECT_TRUE(at::equal(all[r], bytes)) << count << " elements, rank " << r;
  }
}

TEST(Collectives, EightMegabytes) {
  const at::Tensor mine = at::full({2 << 20}, world().rank() + 1, at::kFloat);
  world().all_reduce(mine);
  const int sum = world().size() * (world().size() + 1) / 2;
  EXPECT_EQ(mine.min().item<float>(), static_cast<float>(sum));
  EXPECT_EQ(mine.max().item<float>(), static_cast<float>(sum));
}

/// Returns a copy of `tensor` in memory of this process, which is not shared.
at::Tensor copy_outside_arena(const at::Tensor& tensor) {
  auto memory = std::make_shared<std::vector<char>>(tensor.nbytes());
  return at::from_blob(memory->data(), tensor.sizes(), [memory](void*) {}, tensor.options()).copy_(tensor);
}

/// Returns integers, so that sums are exact.
at::Tensor int_values(int rank, std::int64_t count) {
  return at::arange(count, at::kLong).remainder(97).add(rank).to(at::kFloat);
}

void check_all_operations(std::int64_t n, const std::function<at::Tensor(const at::Tensor&)>& copy) {
  const Group& w = world();
  const int size = w.size(), me = w.rank(), root = size - 1;
  const auto part = [&](const at::Tensor& whole, int r) { return whole.narrow(0, r * n, n); };
  const auto all = [&](const std::function<at::Tensor(int)>& of) {
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size; ++r) parts.push_back(of(r));
    return parts;
  };
  const at::Tensor sum = at::stack(all([&](int r) { return int_values(r, n); })).sum(0);
  const at::Tensor cat = at::cat(all([&](int r) { return int_values(r, n); }));

  at::Tensor t = copy(int_values(me, n));
  w.all_reduce(t);
  EXPECT_TRUE(t.equal(sum)) << "all_reduce";
  t = copy(int_values(me, n));
  w.reduce(t, root);
  EXPECT_TRUE(me != root || t.equal(sum)) << "reduce";
  t = copy(int_values(me, n));
  w.broadcast(t, root);
  EXPECT_TRUE(t.equal(int_values(root, n))) << "broadcast";
  at::Tensor whole = copy(at::zeros({size * n}));
  w.all_gather(whole, copy(int_values(me, n)));
  EXPECT_TRUE(whole.equal(cat)) << "all_gather";
  whole = copy(at::zeros({size * n}));
  w.gather(whole, copy(int_values(me, n)), root);
  EXPECT_TRUE(me != root || whole.equal(cat)) << "gather";
  t = copy(at::zeros({n}));
  w.scatter(t, copy(cat), root);
  EXPECT_TRUE(t.equal(int_values(me, n))) << "scatter";
  t = copy(at::zeros({n}));
  w.reduce_scatter(t, copy(int_values(me, size * n)));
  EXPECT_TRUE(t.equal(part(at::stack(all([&](int r) { return int_values(r, size * n); })).sum(0), me)))
      << "reduce_scatter";
  whole = copy(at::zeros({size * n}));
  w.all_to_all(whole, copy(int_values(me, size * n)));
  EXPECT_TRUE(whole.equal(at::cat(all([&](int r) { return part(int_values(r, size * n), me); })))) << "all_to_all";
  if (size == 1) return;
  t = copy(at::zeros({n}));
  Work sent = w.send_async(copy(int_values(me, n)), (me + 1) % size);
  w.recv(t, (me + size - 1) % size);
  sent.wait();
  EXPECT_TRUE(t.equal(int_values((me + size - 1) % size, n))) << "send and recv";
}

TEST(Collectives, LargeTensorsOfEveryOperation) {
  for (const std::int64_t count : {1500, 400'003})
    check_all_operations(count, [](const at::Tensor& t) { return t.clone(); });
}

TEST(Collectives, TensorsOutsideArena) {
  for (const std::int64_t count : {7, 1500, 400'003}) check_all_operations(count, copy_outside_arena);
}

TEST(Collectives, TensorsOutsideArenaOnSomeRanks) {
  const int size = world().size();
  const std::int64_t counts[] = {131'072, 131'073,   400'003,
                                 1,       1'000'000, 9};  // the first is the largest that is sent in one chunk
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (std::size_t i = 0; i < std::size(counts); ++i) {
    const at::Tensor mine = int_values(world().rank(), counts[i]);
    const bool hidden = world().rank() == static_cast<int>(i) % size;
    tensors.push_back(hidden ? copy_outside_arena(mine) : mine);
    works.push_back(world().all_reduce_async(tensors.back()));
  }
  for (Work& work : works) work.wait();
  for (std::size_t i = 0; i < std::size(counts); ++i)
    EXPECT_TRUE(tensors[i].equal(int_values(0, counts[i]) * size + size * (size - 1) / 2)) << counts[i];
}

TEST(Collectives, ShmAddsInRankOrder) {
  if (world().transport() != "shm") return;
  for (const std::int64_t count : {9, 300'001}) {
    const auto of = [&](int rank) {
      at::Tensor numbers = at::arange(count, at::kDouble).add(1 + 37 * rank).reciprocal().sin();
      return numbers.to(at::kFloat);
    };
    at::Tensor expected = of(0);
    for (int r = 1; r < world().size(); ++r) expected = expected + of(r);
    at::Tensor t = of(world().rank());
    world().all_reduce(t);
    EXPECT_TRUE(t.equal(expected)) << count;
  }
}

}  // namespace
}  // namespace lockstep::tests::collectives_test
