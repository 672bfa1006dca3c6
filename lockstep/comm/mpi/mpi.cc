#include "lockstep/comm/mpi/mpi.h"

#include <ATen/core/grad_mode.h>
#include <sched.h>

#include <climits>
#include <stdexcept>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/mpi/runtime.h"

namespace lockstep::comm::mpi {
namespace {

using base::Cause;
using base::CommError;
using base::Deadline;

constexpr int kNumTags = 32768;           // every MPI implementation has at least this many tags
constexpr int kYieldsBeforeSleep = 1000;  // polls before a waiting thread sleeps between them
constexpr auto kPollInterval = std::chrono::microseconds(50);

/// Calls `done` until it returns true; returns false at the deadline. MPI makes progress only inside its functions.
template <typename Done>
bool poll_until(Deadline deadline, Done done) {
  for (int polls = 0; !done(); ++polls) {
    if (deadline.expired()) return false;
    if (polls < kYieldsBeforeSleep)
      ::sched_yield();
    else
      std::this_thread::sleep_for(kPollInterval);
  }
  return true;
}

/// A nonblocking MPI operation.
class MpiPending final : public Pending {
 public:
  MpiPending(const Collective& op, int size) : op_(op), size_(size) {}

  bool done() override {
    if (is_finished()) return true;
    {
      const std::lock_guard lock(MpiRuntime::this_process().mutex());
      if (is_finished()) return true;
      int ended = 0;
      const int code = api().Test(&request, &ended, MPI_STATUS_IGNORE);
      if (code == MPI_SUCCESS && !ended) return false;
      complete_with(code);
    }
    return true;
  }
  bool wait_until(Deadline deadline) override {
    return poll_until(deadline, [this] { return done(); });
  }
  bool is_complete() const { return is_finished(); }

  MPI_Request request = api().no_request;

 private:
  void complete_with(int code) {
    try {
      check_mpi_result(code, "MPI_Test");
      const at::NoGradGuard no_grad;
      if (op_.op == ReduceOp::kMean && code == MPI_SUCCESS) (op_.output.defined() ? op_.output : op_.input).div_(size_);
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
  }

  const Collective op_;  // keeps the tensors alive
  const int size_;
};

class MpiTransport final : public Transport {
 public:
  MpiTransport(MPI_Comm comm, int rank, int size) : comm_(comm), rank_(rank), size_(size) {}

  ~MpiTransport() override {
    MpiRuntime& runtime = MpiRuntime::this_process();
    {
      const std::lock_guard lock(runtime.mutex());
      remove_completed();
      // Collective according to the standard, but local in practice: it does not wait for other ranks.
      if (in_flight_.empty() && !aborted_ && runtime.is_usable()) api().Comm_free(&comm_);
    }
    abort(closed_error("mpi", rank_));
  }

  std::string_view name() const override { return "mpi"; }
  const Capabilities& capabilities() const override {
    static const Capabilities all{};
    return all;
  }

  PendingPtr start(const Collective& op) override {
    auto pending = std::make_shared<MpiPending>(op, size_);
    const std::lock_guard lock(MpiRuntime::this_process().mutex());
    if (aborted_) {
      pending->finish(aborted_);
      return pending;
    }
    remove_completed();
    try {
      check_mpi_result(start_request(op, pending->request), "MPI");
      in_flight_.push_back(pending);
    } catch (...) {
      pending->finish(std::current_exception());
    }
    return pending;
  }

  void abort(std::exception_ptr cause) noexcept override {
    const std::lock_guard lock(MpiRuntime::this_process().mutex());
    if (aborted_) return;
    aborted_ = cause;
    for (const auto& pending : in_flight_) pending->finish(cause);
    // Never freed: MPI may write to their tensors until the process ends.
    static auto* const leaked = new std::vector<std::shared_ptr<MpiPending>>;
    leaked->insert(leaked->end(), in_flight_.begin(), in_flight_.end());
    in_flight_.clear();
  }

 private:
  void remove_completed() {
    std::erase_if(in_flight_, [](const auto& pending) { return pending->is_complete(); });
  }

  static int count_of(const at::Tensor& tensor) {
    if (!tensor.defined()) return 0;
    if (tensor.numel() > INT_MAX)
      throw std::runtime_error("a tensor has " + std::to_string(tensor.numel()) +
                               " elements; expected at most 2147483647, the limit of MPI");
    return static_cast<int>(tensor.numel());
  }

  /// Starts `op`. Returns an MPI error code.
  int start_request(const Collective& op, MPI_Request& request) {
    const MpiRuntime& runtime = MpiRuntime::this_process();
    const at::ScalarType dtype = op.input.defined()    ? op.input.scalar_type()
                                 : op.output.defined() ? op.output.scalar_type()
                                                       : at::kByte;
    const MPI_Datatype type = runtime.type(dtype);
    const MPI_Op reduce_op = runtime.op(op.op, dtype);
    const void* in = op.input.defined() ? op.input.const_data_ptr() : nullptr;
    void* out = op.output.defined() ? op.output.mutable_data_ptr() : nullptr;
    const int send_count = count_of(op.input);
    const int recv_count = count_of(op.output);
    const int tag = static_cast<int>(op.seq % kNumTags);
    switch (op.kind) {
      case CollectiveKind::kAllReduce:
        return api().Iallreduce(MPI_IN_PLACE, out, send_count, type, reduce_op, comm_, &request);
      case CollectiveKind::kReduce:
        return api().Ireduce(rank_ == op.root ? MPI_IN_PLACE : in, rank_ == op.root ? out : nullptr, send_count, type,
                             reduce_op, op.root, comm_, &request);
      case CollectiveKind::kBroadcast: return api().Ibcast(out, send_count, type, op.root, comm_, &request);
      case CollectiveKind::kAllGather:
        return api().Iallgather(in, send_count, type, out, send_count, type, comm_, &request);
      case CollectiveKind::kReduceScatter:
        return api().Ireduce_scatter_block(in, out, recv_count, type, reduce_op, comm_, &request);
      case CollectiveKind::kGather:
        return api().Igather(in, send_count, type, out, send_count, type, op.root, comm_, &request);
      case CollectiveKind::kScatter:
        return api().Iscatter(in, recv_count, type, out, recv_count, type, op.root, comm_, &request);
      case CollectiveKind::kAllToAll:
        return api().Ialltoall(in, send_count / size_, type, out, send_count / size_, type, comm_, &request);
      case CollectiveKind::kSend: return api().Isend(in, send_count, type, op.root, tag, comm_, &request);
      case CollectiveKind::kRecv: return api().Irecv(out, recv_count, type, op.root, tag, comm_, &request);
      case CollectiveKind::kBarrier: return api().Ibarrier(comm_, &request);
    }
    throw base::UsageError("mpi: unknown operation " + std::to_string(static_cast<int>(op.kind)));
  }

  MPI_Comm comm_;
  const int rank_;
  const int size_;
  // Guarded by MpiRuntime::mutex().
  std::exception_ptr aborted_;
  std::vector<std::shared_ptr<MpiPending>> in_flight_;
};

/// Blocks until all members have set `key` in the store of their communicator. Sets it for this rank first.
void wait_for_members(job::Store& store, const MpiOptions& options, const std::string& key) {
  store.set(key + "/" + std::to_string(options.rank), "1", options.deadline);
  for (std::size_t i = 0; i < options.members.size(); ++i)
    if (!store.get(key + "/" + std::to_string(i), options.deadline))
      throw CommError(Cause::kJoinTimeout, "connect", options.members[static_cast<std::size_t>(options.rank)],
                      options.members[i],
                      "rank " + std::to_string(options.members[i]) + " did not join a new group in time");
}

MPI_Comm create_communicator(const std::vector<int>& members) {
  const std::lock_guard lock(MpiRuntime::this_process().mutex());
  MPI_Group all, some;
  MPI_Comm comm = api().no_comm;
  check_mpi_result(api().Comm_group(api().world, &all), "MPI_Comm_group");
  check_mpi_result(api().Group_incl(all, static_cast<int>(members.size()), members.data(), &some), "MPI_Group_incl");
  check_mpi_result(api().Comm_create_group(api().world, some, /*tag=*/0, &comm), "MPI_Comm_create_group");
  api().Group_free(&some);
  api().Group_free(&all);
  api().Comm_set_errhandler(comm, api().errors_return);
  return comm;
}

/// Creates one communicator of the job at a time, in the order of tickets that the first member of each draws. MPI
/// distinguishes concurrent creations by their tags only, and they block while MPI is locked: threads of two ranks that
/// create the same two communicators in different orders would otherwise exchange them. A ticket is drawn when all
/// members are ready, so those of the next one never wait for another communicator.
MPI_Comm create_in_order(job::Store& own, job::Store& order, const MpiOptions& options) {
  wait_for_members(own, options, "come");
  const int own_world_rank = options.members[static_cast<std::size_t>(options.rank)];
  std::string ticket;
  if (options.rank == 0) {
    const std::int64_t number = order.add("tickets", 1, options.deadline);
    ticket = std::to_string(number);
    if (number > 1 && !order.get("created/" + std::to_string(number - 1), options.deadline))
      throw CommError(Cause::kJoinTimeout, "connect", own_world_rank, -1,
                      "another group was not created in time, and groups are created one at a time");
    own.set("turn", "1", options.deadline);
  } else if (!own.get("turn", options.deadline)) {
    throw CommError(Cause::kJoinTimeout, "connect", own_world_rank, options.members[0],
                    "it was not the new group's turn in time");
  }
  try {
    const MPI_Comm comm = create_communicator(options.members);
    wait_for_members(own, options, "created");
    if (!ticket.empty()) order.set("created/" + ticket, "1", options.deadline);
    return comm;
  } catch (...) {
    if (!ticket.empty()) order.set("created/" + ticket, "1", Deadline::in(std::chrono::seconds(1)));
    throw;
  }
}

}  // namespace

std::string mpi_unavailable_reason() {
  try {
    return mpi_launcher_mismatch(base::Env::this_process(), loaded_mpi());
  } catch (const base::UsageError& error) {  // there is no MPI library
    return error.what();
  }
}

void check_mpi_library() {
  const std::string wrong = mpi_library_mismatch(build_time_mpi(), loaded_mpi());
  if (!wrong.empty())
    throw base::UsageError(wrong,
                           "build with the MPI library that is loaded, or set LD_LIBRARY_PATH to the directory of the "
                           "one of the build (ldd lists the loaded one)",
                           Cause::kConfigMismatch);
}

void init_mpi(int rank, int size) {
  const MpiRuntime& runtime = MpiRuntime::this_process();
  if (runtime.rank() == rank && runtime.size() == size) return;
  throw base::UsageError("the launcher reports rank " + std::to_string(rank) + " of " + std::to_string(size) +
                             ", but MPI (" + to_string(loaded_mpi()) + ", built with " + to_string(build_time_mpi()) +
                             ") reports rank " + std::to_string(runtime.rank()) + " of " +
                             std::to_string(runtime.size()),
                         "start the ranks with the mpirun of that MPI, or set LOCKSTEP_STORE=HOST:PORT and "
                         "LOCKSTEP_CROSS_HOST_TRANSPORT=tcp to use no MPI",
                         Cause::kConfigMismatch);
}

std::shared_ptr<Transport> make_mpi_transport(const MpiOptions& options) {
  MpiRuntime& runtime = MpiRuntime::this_process();
  const int own_world_rank = options.members[static_cast<std::size_t>(options.rank)];
  if (runtime.rank() != own_world_rank)
    throw base::UsageError("transport mpi: this process is rank " + std::to_string(own_world_rank) + ", but rank " +
                           std::to_string(runtime.rank()) +
                           " of MPI_COMM_WORLD; expected equal ranks. Start the ranks with mpirun alone");
  // MPI would wait for the other ranks without a limit, so it is called only when all of them are ready.
  job::PrefixStore own("mpi/" + options.name, options.store), order("mpi order", options.store);
  const MPI_Comm comm = create_in_order(own, order, options);
  return std::make_shared<MpiTransport>(comm, options.rank, static_cast<int>(options.members.size()));
}

std::string broadcast_over_mpi(const std::string& text, Deadline deadline) {
  MpiRuntime& runtime = MpiRuntime::this_process();
  char bytes[256] = {};
  bytes[0] = static_cast<char>(text.copy(bytes + 1, sizeof bytes - 1));
  MPI_Request request;
  {
    const std::lock_guard lock(runtime.mutex());
    check_mpi_result(api().Ibcast(bytes, sizeof bytes, api().int8, 0, api().world, &request), "MPI_Ibcast");
  }
  const bool completed = poll_until(deadline, [&] {
    const std::lock_guard lock(runtime.mutex());
    int ended = 0;
    check_mpi_result(api().Test(&request, &ended, MPI_STATUS_IGNORE), "MPI_Ibcast");
    return ended != 0;
  });
  if (!completed)
    throw CommError(Cause::kJoinTimeout, "init", runtime.rank(), 0,
                    "rank 0 did not broadcast the rendezvous address over MPI in time");
  return std::string(bytes + 1, static_cast<unsigned char>(bytes[0]));
}

bool is_mpi_world_on_one_host() {
  MpiRuntime& runtime = MpiRuntime::this_process();
  const std::lock_guard lock(runtime.mutex());
  MPI_Comm host_comm;
  check_mpi_result(api().Comm_split_type(api().world, MPI_COMM_TYPE_SHARED, 0, api().no_info, &host_comm),
                   "MPI_Comm_split_type");
  int size = 0;
  api().Comm_size(host_comm, &size);
  api().Comm_free(&host_comm);
  return size == runtime.size();
}

}  // namespace lockstep::comm::mpi
