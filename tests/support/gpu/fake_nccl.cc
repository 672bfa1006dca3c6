// The fake NCCL. Ranks exchange data through files in a directory whose name identifies the communicator. They do so on
// the stream, so that code that does not wait for the stream reads old values. FAKE_NCCL_FAULT injects a fault: with
// "CALL=RESULT@RANK", that call returns that result on that rank of a communicator; with "async=RESULT@RANK", an
// operation in progress reports that result and never ends; with "hang@RANK", operations of that rank never start.
// ncclGetLastError() returns FAKE_NCCL_ERROR_TEXT.
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "tests/support/gpu/fake_gpu.h"

namespace fs = std::filesystem;

using Clock = std::chrono::steady_clock;

struct ncclComm {
  std::string folder;
  int rank = 0, size = 1;
  std::atomic<bool> aborted{false}, connected{false}, is_stuck{false};
  bool is_leaving = false;
  int operations = 0, splits = 0;
  std::map<int, int> sent, received;
  struct Split {
    int number, color, key;
    ncclComm_t* child;
    Clock::time_point earliest;  // until then it is in progress: NCCL takes half a second
  };
  std::vector<Split> pending_splits;
};

namespace fake_gpu {
namespace {

using Bytes = std::vector<char>;

struct FaultPlan {
  std::string call;
  int result = 0, rank = -1;
};

const FaultPlan& fault_plan() {
  static const FaultPlan plan = [] {
    FaultPlan parsed;
    const std::string text = env_variable("FAKE_NCCL_FAULT");
    parsed.call = text.substr(0, text.find_first_of("=@"));
    if (const auto at = text.find('='); at != std::string::npos) parsed.result = std::atoi(text.c_str() + at + 1);
    if (const auto at = text.find('@'); at != std::string::npos) parsed.rank = std::atoi(text.c_str() + at + 1);
    return parsed;
  }();
  return plan;
}

/// Returns the result that `call` must return on `rank`: ncclSuccess unless a fault is injected.
ncclResult_t planned_result(const char* call, int rank) {
  return fault_plan().call == call && fault_plan().rank == rank ? static_cast<ncclResult_t>(fault_plan().result)
                                                                : ncclSuccess;
}

/// Writes the file atomically.
void write_file(const std::string& path, const void* data, std::size_t bytes) {
  const std::string part = path + ".part";
  std::ofstream(part, std::ios::binary).write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  std::rename(part.c_str(), path.c_str());
}

Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Returns false if the communicator is aborted before the file exists.
bool wait_for_file(const ncclComm& comm, const std::string& path) {
  while (!fs::exists(path)) {
    if (comm.aborted) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

std::string path_of(const ncclComm& comm, int operation, int rank) {
  return comm.folder + "/" + std::to_string(operation) + "." + std::to_string(rank);
}

std::size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclFloat64: return 8;
    default: std::abort();  // no caller passes another type
  }
}

struct Bf16 {
  std::uint16_t bits = 0;
  Bf16() = default;
  Bf16(float x) : bits(static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(x) + 0x8000U) >> 16)) {}
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

template <typename T, typename Wide>
void add_up(std::vector<Bytes>& parts, ncclRedOp_t op, char* to, std::size_t first, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = [&](std::size_t rank) {
      return static_cast<Wide>(reinterpret_cast<const T*>(parts[rank].data())[first + i]);
    };
    Wide sum = value(0);
    for (std::size_t rank = 1; rank < parts.size(); ++rank) {
      const Wide next = value(rank);
      sum = op == ncclProd  ? sum * next
            : op == ncclMax ? std::max(sum, next)
            : op == ncclMin ? std::min(sum, next)
                            : sum + next;
    }
    if (op == ncclAvg) sum = static_cast<Wide>(sum / static_cast<Wide>(parts.size()));
    reinterpret_cast<T*>(to)[i] = static_cast<T>(sum);
  }
}

void reduce(std::vector<Bytes>& parts, ncclDataType_t type, ncclRedOp_t op, char* to, std::size_t first,
            std::size_t count) {
  switch (type) {
    case ncclInt8: return add_up<std::int8_t, std::int8_t>(parts, op, to, first, count);
    case ncclUint8: return add_up<std::uint8_t, std::uint8_t>(parts, op, to, first, count);
    case ncclInt32: return add_up<std::int32_t, std::int32_t>(parts, op, to, first, count);
    case ncclInt64: return add_up<std::int64_t, std::int64_t>(parts, op, to, first, count);
    case ncclFloat16: return add_up<_Float16, float>(parts, op, to, first, count);
    case ncclBfloat16: return add_up<Bf16, float>(parts, op, to, first, count);
    case ncclFloat32: return add_up<float, float>(parts, op, to, first, count);
    case ncclFloat64: return add_up<double, double>(parts, op, to, first, count);
    default: std::abort();  // no caller passes another type
  }
}

/// Writes this rank's part of operation `number` and returns the parts of all ranks. Returns nothing if the
/// communicator is aborted.
std::vector<Bytes> gather_parts(const ncclComm& comm, int number, const void* mine, std::size_t bytes) {
  write_file(path_of(comm, number, comm.rank), mine, bytes);
  std::vector<Bytes> parts;
  for (int rank = 0; rank < comm.size; ++rank) {
    if (!wait_for_file(comm, path_of(comm, number, rank))) return {};
    parts.push_back(read_file(path_of(comm, number, rank)));
  }
  return parts;
}

bool finish_splits(ncclComm_t comm);
bool all_ranks_have(const ncclComm& comm, const std::string& what);

/// Returns whether the last nonblocking call has ended.
bool is_settled(ncclComm_t comm) {
  if (!comm->connected && all_ranks_have(*comm, "here")) comm->connected = true;
  return comm->connected && finish_splits(comm) && (!comm->is_leaving || all_ranks_have(*comm, "bye"));
}

std::string last_error;

/// The check with which each call of NCCL begins.
ncclResult_t ensure_ready(ncclComm_t comm) {
  if (is_settled(comm)) return ncclSuccess;
  last_error = "Attempt to use communicator before the previous operation returned ncclSuccess";
  return ncclInvalidArgument;
}

/// The result with which `call` must return before it does anything.
ncclResult_t begin_call(const char* call, ncclComm_t comm) {
  const ncclResult_t result = planned_result(call, comm->rank);
  return result != ncclSuccess ? result : ensure_ready(comm);
}

thread_local int depth = 0;
thread_local std::vector<std::function<void()>> sends, receives;
thread_local cudaStream_t stream_of_group = nullptr;

/// Enqueues `work` on the stream. If a fault is injected, returns its result instead, or enqueues a task that blocks
/// until the communicator is aborted.
ncclResult_t enqueue_call(const char* call, ncclComm_t comm, cudaStream_t stream,
                          std::function<void(int number)> work) {
  if (const ncclResult_t result = begin_call(call, comm); result != ncclSuccess) return result;
  const int number = comm->operations++;
  const bool stuck = planned_result("hang", comm->rank) != ncclSuccess ||
                     (fault_plan().call == "hang" && fault_plan().rank == comm->rank);
  const bool fails = fault_plan().call == "async" && fault_plan().rank == comm->rank;
  enqueue(stream, [comm, number, stuck, fails, work = std::move(work)] {
    if (fails) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that the call has returned by then
      comm->is_stuck = true;
    }
    while ((stuck || fails) && !comm->aborted) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!comm->aborted) work(number);
  });
  return ncclSuccess;
}

ncclResult_t add_to_group(std::vector<std::function<void()>>& list, std::function<void()> work, cudaStream_t stream) {
  list.push_back(std::move(work));
  stream_of_group = stream;
  if (depth > 0) return ncclSuccess;
  ++depth;
  return ncclGroupEnd();
}

/// Communicators are never freed, because streams may still refer to one that was destroyed.
ncclComm* new_communicator() {
  static std::vector<std::unique_ptr<ncclComm>>& all = *new std::vector<std::unique_ptr<ncclComm>>;
  const std::lock_guard lock(mutex());
  return all.emplace_back(std::make_unique<ncclComm>()).get();
}

/// Creates the child communicators of pending splits that all ranks have called. Returns whether none is pending.
bool finish_splits(ncclComm_t comm) {
  while (!comm->pending_splits.empty()) {
    const auto& split = comm->pending_splits.front();
    if (Clock::now() < split.earliest) return false;
    const std::string base = comm->folder + "/split" + std::to_string(split.number) + ".";
    std::vector<std::pair<int, int>> mine;  // (key, rank)
    for (int rank = 0; rank < comm->size; ++rank) {
      if (!fs::exists(base + std::to_string(rank))) return false;
      const Bytes bytes = read_file(base + std::to_string(rank));
      std::istringstream text(std::string(bytes.begin(), bytes.end()));
      int color = 0, key = 0;
      text >> color >> key;
      if (color == split.color) mine.emplace_back(key, rank);
    }
    if (split.color != NCCL_SPLIT_NOCOLOR) {
      ncclComm* child = new_communicator();
      child->folder = comm->folder + "/split" + std::to_string(split.number) + "_" + std::to_string(split.color);
      fs::create_directories(child->folder);
      std::sort(mine.begin(), mine.end());
      child->size = static_cast<int>(mine.size());
      for (std::size_t i = 0; i < mine.size(); ++i)
        if (mine[i].second == comm->rank) child->rank = static_cast<int>(i);
      child->connected = true;
      *split.child = child;
    }
    comm->pending_splits.erase(comm->pending_splits.begin());
  }
  return true;
}

/// Records that this rank no longer uses the communicator's directory. The last rank removes the directory.
void leave_communicator(ncclComm_t comm) {
  if (comm->folder.find("/split") != std::string::npos) return;  // removed with the directory of its parent
  write_file(comm->folder + "/gone." + std::to_string(comm->rank), "", 0);
  std::error_code ignored;
  if (all_ranks_have(*comm, "gone")) fs::remove_all(comm->folder, ignored);
}

bool all_ranks_have(const ncclComm& comm, const std::string& what) {
  for (int rank = 0; rank < comm.size; ++rank)
    if (!fs::exists(comm.folder + "/" + what + "." + std::to_string(rank))) return false;
  return true;
}

}  // namespace
}  // namespace fake_gpu

using namespace fake_gpu;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  const std::string number = env_variable("FAKE_NCCL_VERSION");
  *version = number.empty() ? NCCL_VERSION_CODE : std::stoi(number);
  return ncclSuccess;
}
const char* ncclGetLastError(ncclComm_t) {
  static const std::string text = env_variable("FAKE_NCCL_ERROR_TEXT");
  return text.empty() ? last_error.c_str() : text.c_str();
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (const ncclResult_t result = planned_result("ncclGetUniqueId", 0); result != ncclSuccess) return result;
  const std::string base = env_variable("TMPDIR");
  std::string folder = (base.empty() ? "/tmp" : base) + "/fake_nccl_XXXXXX";
  if (!::mkdtemp(folder.data()) || folder.size() >= sizeof id->internal) return ncclSystemError;
  std::memset(id->internal, 0, sizeof id->internal);
  folder.copy(id->internal, folder.size());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  *comm = nullptr;
  if (config->blocking != 0) return ncclInvalidArgument;
  if (const ncclResult_t result = planned_result("ncclCommInitRankConfig", rank); result != ncclSuccess) return result;
  ncclComm* made = new_communicator();
  made->folder = id.internal;
  made->rank = rank;
  made->size = size;
  write_file(made->folder + "/here." + std::to_string(rank), "", 0);
  *comm = made;
  return ncclInProgress;
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t*) {
  if (const ncclResult_t result = begin_call("ncclCommSplit", comm); result != ncclSuccess) return result;
  const std::string text = std::to_string(color) + " " + std::to_string(key);
  const int number = comm->splits++;
  write_file(comm->folder + "/split" + std::to_string(number) + "." + std::to_string(comm->rank), text.data(),
             text.size());
  comm->pending_splits.push_back({number, color, key, child, Clock::now() + std::chrono::milliseconds(20)});
  std::fprintf(stderr, "fake ncclCommSplit\n");
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  if (comm->is_stuck) {
    *state = static_cast<ncclResult_t>(fault_plan().result);
    return ncclSuccess;
  }
  *state = is_settled(comm) ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (const ncclResult_t result = ensure_ready(comm); result != ncclSuccess) return result;
  comm->is_leaving = true;
  write_file(comm->folder + "/bye." + std::to_string(comm->rank), "", 0);
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  leave_communicator(comm);
  std::fprintf(stderr, "fake ncclCommDestroy\n");
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->aborted = true;
  leave_communicator(comm);
  std::fprintf(stderr, "fake ncclCommAbort\n");
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return enqueue_call("ncclAllReduce", comm, stream, [=](int number) {
    auto parts = gather_parts(*comm, number, from, count * size_of(type));
    if (!parts.empty()) reduce(parts, type, op, static_cast<char*>(to), 0, count);
  });
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return enqueue_call("ncclReduce", comm, stream, [=](int number) {
    auto parts = gather_parts(*comm, number, from, count * size_of(type));
    if (!parts.empty() && comm->rank == root) reduce(parts, type, op, static_cast<char*>(to), 0, count);
  });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return enqueue_call("ncclReduceScatter", comm, stream, [=](int number) {
    auto parts = gather_parts(*comm, number, from, count * size_of(type) * static_cast<std::size_t>(comm->size));
    if (!parts.empty())
      reduce(parts, type, op, static_cast<char*>(to), count * static_cast<std::size_t>(comm->rank), count);
  });
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue_call("ncclBroadcast", comm, stream, [=](int number) {
    const auto parts = gather_parts(*comm, number, from, comm->rank == root ? count * size_of(type) : 0);
    if (!parts.empty()) std::memcpy(to, parts[static_cast<std::size_t>(root)].data(), count * size_of(type));
  });
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return enqueue_call("ncclAllGather", comm, stream, [=](int number) {
    auto* at = static_cast<char*>(to);
    for (const Bytes& part : gather_parts(*comm, number, from, count * size_of(type))) {
      std::memcpy(at, part.data(), part.size());
      at += part.size();
    }
  });
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  if (const ncclResult_t result = begin_call("ncclSend", comm); result != ncclSuccess) return result;
  const std::string path = comm->folder + "/p." + std::to_string(comm->rank) + "." + std::to_string(peer) + "." +
                           std::to_string(comm->sent[peer]++);
  return add_to_group(sends, [=] { write_file(path, from, count * size_of(type)); }, stream);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  if (const ncclResult_t result = begin_call("ncclRecv", comm); result != ncclSuccess) return result;
  const std::string path = comm->folder + "/p." + std::to_string(peer) + "." + std::to_string(comm->rank) + "." +
                           std::to_string(comm->received[peer]++);
  const auto receive = [=] {
    if (!wait_for_file(*comm, path)) return;
    const Bytes bytes = read_file(path);
    std::memcpy(to, bytes.data(), std::min(bytes.size(), count * size_of(type)));
  };
  return add_to_group(receives, receive, stream);
}
ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--depth > 0) return ncclSuccess;
  enqueue(stream_of_group, [first = std::move(sends), then = std::move(receives)] {
    for (const auto& send : first) send();
    for (const auto& receive : then) receive();
  });
  sends.clear();
  receives.clear();
  return ncclSuccess;
}

}  // extern "C"
