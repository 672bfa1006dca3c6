// Compiles only if programs can use a `const Group&` and cannot call what GroupAccess is for.
#include "lockstep/comm/group.h"

#include <gtest/gtest.h>

namespace lockstep::comm {
namespace {

template <typename G>
concept RunsCollectives = requires(const G& group, const at::Tensor& tensor, std::vector<at::Tensor>& tensors) {
  group.all_reduce(tensor);
  group.all_reduce_async(tensor);
  group.reduce(tensor, 0);
  group.reduce_async(tensor, 0);
  group.broadcast(tensor, 0);
  group.broadcast_async(tensor, 0);
  group.all_gather(tensor, tensor);
  group.all_gather_async(tensor, tensor);
  group.all_gather_unequal(tensor);
  group.all_gather_unequal_async(tensors, tensor);
  group.reduce_scatter(tensor, tensor);
  group.reduce_scatter_async(tensor, tensor);
  group.gather(tensor, tensor, 0);
  group.gather_async(tensor, tensor, 0);
  group.scatter(tensor, tensor, 0);
  group.scatter_async(tensor, tensor, 0);
  group.all_to_all(tensor, tensor);
  group.all_to_all_async(tensor, tensor);
  group.send(tensor, 0);
  group.send_async(tensor, 0);
  group.recv(tensor, 0);
  group.recv_async(tensor, 0);
  group.barrier();
  group.barrier_async();
  group.broadcast_bytes("", 0);
  group.all_gather_bytes("");
  group.split(0);
  group.split_by_host();
  group.step();
  group.steps();
  group.alive();
  group.busy("");
  group.stop_requested();
};
static_assert(RunsCollectives<Group>);

template <typename G>
concept ShowsInternals = requires(G& group) { group.set_steps(0); } || requires(G& group) {
  group.set_stop_agreed();
} || requires(G& group) { group.count_batch(); } || requires(G& group) { group.step_identity(); };
static_assert(!ShowsInternals<Group>);

TEST(Group, IsASmallValue) { EXPECT_EQ(sizeof(Group), sizeof(std::shared_ptr<void>)); }

}  // namespace
}  // namespace lockstep::comm
