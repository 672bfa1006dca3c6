// The state behind a Group. Private to comm/.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/channel/call_signature.h"
#include "lockstep/comm/channel/channel.h"
#include "lockstep/comm/channel/serial_executor.h"
#include "lockstep/comm/group.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

/// One call on its way: the operation on contiguous tensors, what the ranks compare, and what is left to do when it is
/// done.
struct CollectiveRequest {
  Collective op;
  SignatureShape shape;
  std::function<void(Collective&, const std::vector<CallSignature>&)>
      prepare;                        // after the comparison, which told all sizes
  std::function<void()> complete;     // after the operation: copies back
  bool moves_data = true;             // false: the comparison is all of it (barrier)
  std::optional<c10::Stream> stream;  // of tensors on a GPU, for another thread: the caller's
};

/// That of the tensors of `op`, when they are on a GPU.
std::optional<c10::Stream> current_stream(const Collective& op);

/// Throws UsageError when `transport` does not send float32 as `wire`.
void check_wire_dtype(const Transport& transport, const std::string& call, at::ScalarType wire);

struct Group::Impl {
  Impl(std::shared_ptr<World> the_world, std::string the_name, std::vector<int> the_members, int the_rank,
       SplitParent split_parent = {});
  ~Impl();

  void run(CollectiveRequest request);
  Work run_async(CollectiveRequest request);
  void run_point_to_point(CollectiveKind kind, const at::Tensor& tensor, int peer, const CallOptions& options);
  Work start_point_to_point(CollectiveKind kind, const at::Tensor& tensor, int peer, const CallOptions& options);

  /// The operation with what every kind has; checks what can be checked on this rank alone.
  Collective make_collective(CollectiveKind kind, const at::Tensor& tensor, const CallOptions& options) const;
  void check_root(CollectiveKind kind, int root) const;
  void check_reduce(CollectiveKind kind, const at::Tensor& tensor, ReduceOp op) const;
  void check_wire_dtype(CollectiveKind kind, const at::Tensor& tensor, at::ScalarType wire) const;
  [[noreturn]] void fail(const base::CommError& error);

  const std::shared_ptr<World> world;
  const std::string name;
  const std::vector<int> members;  // world ranks
  const int rank;
  /// What a group that is split off this one, by all its ranks, may take along.
  SplitParent split_parent(int color) const { return {transport_.get(), color}; }
  int num_splits = 0;
  int num_reducers = 0;

 private:
  struct StartedSend;
  /// Messages one way between this rank and one peer, whose order is theirs alone.
  struct PeerChannel {
    Channel channel;
    SerialExecutor executor;  // last: its thread ends before what it uses
  };
  void begin(CollectiveRequest& request);
  Work post(CollectiveRequest request);
  void execute(CollectiveRequest& request);
  bool execute_checked(const CollectiveRequest& request, const CallSignature& mine);
  std::vector<CallSignature> gather_signatures(const CollectiveRequest& request, const CallSignature& mine);
  void check_signatures(const CollectiveRequest& request, const std::vector<CallSignature>& calls);
  [[noreturn]] void throw_desync(const Collective& op, const std::vector<CallSignature>& calls,
                                 CallMismatch difference);
  PeerChannel& get_peer_channel(CollectiveKind kind, int peer);
  std::shared_ptr<StartedSend> begin_send(const at::Tensor& tensor, Channel& channel, int to,
                                          const CallOptions& options);
  void receive(Collective op, at::Tensor target, Channel& channel);

  std::vector<char> mismatched_signatures_;  // of execute_checked(): one operation at a time; before the transport,
                                             // which may write there
  std::shared_ptr<Transport> transport_;
  Channel channel_;
  at::Tensor my_signature_;  // the buffers of compare(): one operation at a time
  at::Tensor all_signatures_;
  std::map<std::pair<bool, int>, std::unique_ptr<PeerChannel>> peer_channels_;  // (sending, peer)
  SerialExecutor executor_;                                                     // last, likewise
};

}  // namespace lockstep::comm
