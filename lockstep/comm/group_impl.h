// Group::Impl: the state of a Group. Private to comm/.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/channel/call_signature.h"
#include "lockstep/comm/channel/channel.h"
#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/interface/gradient_reducer.h"
#include "lockstep/comm/reducers/reducer_options.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

struct WatchedCall;

/// A call in progress: the operation on contiguous tensors, the shape that the ranks compare, and the work before and
/// after the operation.
struct CollectiveRequest {
  explicit CollectiveRequest(Collective&& operation, const channel::SignatureShape& compared = {})
      : op(std::move(operation)), shape(compared) {}

  Collective op;
  channel::SignatureShape shape;
  std::function<void(Collective&, const std::vector<channel::CallSignature>&)>
      prepare;                        // called after the comparison, when all sizes are known
  std::function<void()> complete;     // called after the operation: copies results back
  bool moves_data = true;             // false: the operation is the comparison alone (barrier)
  std::optional<c10::Stream> stream;  // for GPU tensors: the caller's current stream, for the executor's thread
};

/// Returns the current stream for the tensors of `op` if they are on a GPU.
std::optional<c10::Stream> current_stream(const Collective& op);

/// Throws UsageError if `transport` does not support `wire_dtype`.
void check_wire_dtype(const Transport& transport, const std::string& call, at::ScalarType wire_dtype);

struct Group::Impl {
  Impl(std::shared_ptr<World> the_world, std::string the_name, std::vector<int> the_members, int the_rank,
       SplitParent split_parent = {});
  ~Impl();

  void run(CollectiveRequest request);
  Work run_async(CollectiveRequest request);
  Work watch(WatchedCall call, PendingPtr done);  // GroupAccess::watch()
  void abandon(const std::string& why) noexcept { channel_.abandon(why); }
  void run_point_to_point(CollectiveKind kind, const at::Tensor& tensor, int peer, const CallOptions& options);
  Work start_point_to_point(CollectiveKind kind, const at::Tensor& tensor, int peer, const CallOptions& options);
  /// Receives from the rank that sends first. Returns that rank, or writes it to `source`.
  int run_receive_any(const at::Tensor& tensor, const CallOptions& options);
  Work start_receive_any(const at::Tensor& tensor, std::shared_ptr<int> source, const CallOptions& options);

  /// Fills in the fields that all kinds of operations have. Throws UsageError for arguments that this rank can reject
  /// without the other ranks.
  Collective make_collective(CollectiveKind kind, const at::Tensor& tensor, const CallOptions& options, int root = 0,
                             ReduceOp reduce_op = ReduceOp::kSum) const;
  void check_root(CollectiveKind kind, int root) const;
  void check_wire_dtype(const at::Tensor& tensor, ReduceOp op, at::ScalarType wire_dtype) const;
  [[noreturn]] void fail(const base::CommError& error);
  /// GroupAccess::make_gradient_reducer() without the decorators. `reducer_name` is the name of the model.
  std::unique_ptr<GradientReducer> make_reducer(std::string reducer_name, std::vector<GradientSpec> specs,
                                                reducers::ReducerOptions options);

  const std::shared_ptr<World> world;
  const std::string name;
  const std::vector<int> members;  // world ranks
  const int rank;
  /// The parent of a group that all ranks of this group split off.
  SplitParent split_parent(int color) const { return {transport_.get(), color}; }
  int num_splits = 0;
  int num_value_keys = 0;

  std::atomic<bool> is_called{false};  // a thread is inside run() or run_async()

  // What this group has counted, for the checks of reductions.
  std::atomic<std::int64_t> steps{0};
  std::atomic<std::int64_t> batches{0};
  std::atomic<std::uint16_t> sample_order_parts{0};  // sums of their parts
  std::atomic<std::uint32_t> sample_order_hash{0};   // sum of the hashes of the orders that batches were drawn from

  std::mutex steps_mutex;                                                  // guards step_observers
  std::vector<std::weak_ptr<const std::function<void()>>> step_observers;  // of GroupAccess::on_step()

 private:
  struct StartedSend;
  struct PeerChannel;
  struct AnySource;
  void begin(CollectiveRequest& request);
  Work post(CollectiveRequest request);
  void execute(CollectiveRequest& request);
  bool execute_checked(const CollectiveRequest& request, const channel::CallSignature& mine);
  std::vector<channel::CallSignature> gather_signatures(const CollectiveRequest& request,
                                                        const channel::CallSignature& mine);
  /// Returns the calls of all ranks, whose signatures are in `bytes`. Throws DesyncError if they differ.
  std::vector<channel::CallSignature> check_signatures(const CollectiveRequest& request, const void* bytes);
  PeerChannel& get_peer_channel(CollectiveKind kind, int peer);
  std::shared_ptr<StartedSend> begin_send(const at::Tensor& tensor, channel::Channel& channel, int to,
                                          const CallOptions& options);
  void receive(const Collective& op, const at::Tensor& target, PeerChannel& pair);
  AnySource& get_any_source();
  Collective begin_receive_any(const at::Tensor& tensor, const CallOptions& options, AnySource& any);

  std::vector<char> mismatched_signatures_;  // of execute_checked(), one operation at a time. Declared before the
                                             // transport, which may write to it
  std::shared_ptr<Transport> transport_;
  channel::Channel channel_;
  int num_reducers_ = 0;
  at::Tensor my_signature_;  // buffers of gather_signatures(), one operation at a time
  at::Tensor all_signatures_;
  std::map<std::pair<bool, int>, std::unique_ptr<PeerChannel>> peer_channels_;  // (sending, peer)
  std::unique_ptr<AnySource> any_source_;                                       // made by the first receive from any
  channel::SerialExecutor executor_;  // last member: its thread ends before the members that it uses
};

}  // namespace lockstep::comm
