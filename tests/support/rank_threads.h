// The ranks of one host as threads of this process, for tests of the structures in shared memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/arena/arena.h"
#include "lockstep/comm/shm/control_block.h"
#include "lockstep/comm/shm/local_peers.h"
#include "lockstep/job/local_store.h"

namespace lockstep::tests {

/// How the ranks see each other's memory.
enum class Mapping {
  /// All ranks use one arena through one mapping. ThreadSanitizer relates two accesses only if their addresses are
  /// equal.
  kShared,
  /// Each rank has an arena of its own and maps those of the others at other addresses, as processes do. Finds
  /// addresses that are stored where offsets belong.
  kDistinct,
};

class RankThreads;

/// What one of the threads gets.
struct RankThread {
  RankThreads& all;
  const int rank;
  const int size;
  comm::arena::Arena& arena;
  const std::shared_ptr<const comm::shm::LocalPeers> peers;

  /// Connects the control blocks of all ranks. Every rank must call it, in the same order.
  std::unique_ptr<comm::shm::ControlBlocks> connect();
  /// A store that only the next call on each rank uses. Every rank must call it, in the same order.
  std::shared_ptr<job::Store> next_store();
  /// An uninitialized tensor in the arena of this rank.
  at::Tensor tensor(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) const;
  /// Makes the other ranks believe that the process of this rank has ended. With Mapping::kShared only.
  void die() const;

  int num_stores = 0;
};

class RankThreads {
 public:
  RankThreads(int size, Mapping mapping);
  ~RankThreads();

  /// Runs `body` in one thread per rank and waits for them. Rethrows the exception of the lowest rank that threw one.
  void run(const std::function<void(RankThread&)>& body);

 private:
  friend struct RankThread;
  std::shared_ptr<const comm::shm::LocalPeers> connect(int rank);

  const int size_;
  const Mapping mapping_;
  std::vector<std::unique_ptr<comm::arena::Arena>> arenas_;  // one per rank, or one for all
  const std::shared_ptr<job::LocalStore> store_ = std::make_shared<job::LocalStore>();
  // With one mapping: sockets_[a][b] is the end of rank a of its connection to rank b. LocalPeers owns a duplicate.
  std::vector<std::vector<base::Fd>> sockets_;
};

inline constexpr auto kConnectTimeout = std::chrono::seconds(60);
inline constexpr std::size_t kArenaBytes = std::size_t{512} << 20;

inline std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Not owned: the arena outlives all peers.
inline std::shared_ptr<const base::SharedMemory> memory_of(const comm::arena::Arena& arena) {
  return {&arena.memory(), [](const auto*) {}};
}

inline RankThreads::RankThreads(int size, Mapping mapping) : size_(size), mapping_(mapping) {
  const int num_arenas = mapping == Mapping::kShared ? 1 : size;
  for (int i = 0; i < num_arenas; ++i)
    arenas_.push_back(std::make_unique<comm::arena::Arena>(kArenaBytes, kArenaBytes));
  if (mapping == Mapping::kDistinct) return;
  sockets_.resize(static_cast<std::size_t>(size));
  for (auto& row : sockets_) row.resize(static_cast<std::size_t>(size));
  for (std::size_t a = 0; a < sockets_.size(); ++a)
    for (std::size_t b = 0; b < a; ++b) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw base::SystemError("socketpair", errno);
      sockets_[a][b] = base::Fd(ends[0]);
      sockets_[b][a] = base::Fd(ends[1]);
    }
}

inline RankThreads::~RankThreads() = default;

inline std::shared_ptr<const comm::shm::LocalPeers> RankThreads::connect(int rank) {
  if (mapping_ == Mapping::kDistinct)
    return comm::shm::LocalPeers::connect(*arenas_[static_cast<std::size_t>(rank)], *store_, all_ranks(size_), rank,
                                          base::Deadline::in(kConnectTimeout));
  std::map<int, comm::shm::LocalPeer> peers;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank)
      peers[peer] = {base::Fd(::dup(sockets_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(peer)].get())),
                     memory_of(*arenas_[0])};
  return std::make_shared<comm::shm::LocalPeers>(*arenas_[0], all_ranks(size_), rank, std::move(peers),
                                                 comm::shm::SpinPolicy::for_shared_cores());
}

inline void RankThreads::run(const std::function<void(RankThread&)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size_));
  // Until all threads have ended: a rank whose peers are destroyed counts as dead.
  std::vector<std::shared_ptr<const comm::shm::LocalPeers>> peers(static_cast<std::size_t>(size_));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size_; ++rank)
    threads.emplace_back([&, rank] {
      try {
        peers[static_cast<std::size_t>(rank)] = connect(rank);
        RankThread self{.all = *this,
                        .rank = rank,
                        .size = size_,
                        .arena = *arenas_[mapping_ == Mapping::kShared ? 0 : static_cast<std::size_t>(rank)],
                        .peers = peers[static_cast<std::size_t>(rank)]};
        body(self);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
        peers[static_cast<std::size_t>(rank)] = nullptr;
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

inline std::shared_ptr<job::Store> RankThread::next_store() {
  return std::make_shared<job::PrefixStore>("test/" + std::to_string(num_stores++), all.store_);
}

inline std::unique_ptr<comm::shm::ControlBlocks> RankThread::connect() {
  return comm::shm::ControlBlocks::connect(peers, *next_store(), all_ranks(size), rank,
                                           base::Deadline::in(kConnectTimeout));
}

inline at::Tensor RankThread::tensor(at::IntArrayRef sizes, at::ScalarType dtype) const {
  const std::size_t bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  return at::from_blob(arena.allocate(bytes), sizes, [&arena = arena](void* block) { arena.free(block); }, dtype);
}

inline void RankThread::die() const {
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank)
      ::shutdown(all.sockets_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(peer)].get(), SHUT_RDWR);
}

}  // namespace lockstep::tests
