#include "lockstep/comm/arena/fork_copies.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "lockstep/base/host_memory.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/arena/memory_shortage.h"

namespace lockstep::comm::arena {
namespace {

/// An anonymous mapping with the used ranges of a ForkCopied, at the same offsets.
struct Copy {
  const ForkCopied* of;
  std::vector<ForkCopied::Range> used;
  void* data = nullptr;  // null: there is no memory for it, or nothing is used
  std::size_t size() const { return used.empty() ? 0 : used.back().end; }
};

thread_local SharedForkCopies* scope_of_thread = nullptr;

}  // namespace

struct SharedForkCopies::Copies {
  std::vector<Copy> all;

  Copies() = default;
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;
  ~Copies() { clear(); }
  void clear() {
    for (const Copy& copy : all)
      if (copy.data) ::munmap(copy.data, copy.size());
    all.clear();
  }
};

/// What fork() calls. Never destroyed.
class ForkHandlers {
 public:
  static ForkHandlers& this_process() {
    static ForkHandlers* const handlers = [] {
      auto* created = new ForkHandlers;
      ::pthread_atfork([] { this_process().before(); }, [] { this_process().after_in_parent(); },
                       [] { this_process().after_in_child(); });
      return created;
    }();
    return *handlers;
  }

  void add(ForkCopied* memory) {
    const std::lock_guard lock(mutex_);
    registered_.push_back(memory);
  }
  void remove(ForkCopied* memory) {
    const std::lock_guard lock(mutex_);
    std::erase(registered_, memory);
  }

 private:
  static bool is_same(const Copy& a, const Copy& b) {
    return a.of == b.of &&
           std::equal(a.used.begin(), a.used.end(), b.used.begin(), b.used.end(),
                      [](const auto& x, const auto& y) { return x.begin == y.begin && x.end == y.end; });
  }

  void before() {
    mutex_.lock();
    copies_ = scope_of_thread ? scope_of_thread->copies_.get() : &for_one_child_;
    std::vector<Copy> needed;
    std::uint64_t bytes = 0;
    for (const ForkCopied* memory : registered_) {
      if (memory->is_copy_) continue;
      Copy copy{.of = memory,
                .used = memory->used_ ? memory->used_() : std::vector<ForkCopied::Range>{{0, memory->size_}}};
      for (const auto& range : copy.used) bytes += range.end - range.begin;
      needed.push_back(std::move(copy));
    }
    if (std::equal(needed.begin(), needed.end(), copies_->all.begin(), copies_->all.end(), is_same)) return;
    copies_->clear();
    const base::HostMemory host = base::HostMemory::now();
    if (host.available_bytes < bytes + bytes_kept_free())
      base::log_warning("fork(): the child must not use tensors, because there is no memory for its copy of " +
                        base::memory_text(bytes) + ": " + host.describe());
    else
      for (Copy& copy : needed) fill(copy);
    copies_->all = std::move(needed);
  }

  static void fill(Copy& copy) {
    if (copy.size() == 0) return;
    void* const data = ::mmap(nullptr, copy.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
      return base::log_warning(
          std::string("fork(): the child must not use tensors, because the kernel refuses memory for its copy of ") +
          base::memory_text(copy.size()) + ": " + std::strerror(errno));
    ::madvise(data, copy.size(), MADV_HUGEPAGE);
    for (const auto& range : copy.used)
      std::memcpy(static_cast<char*>(data) + range.begin, copy.of->data_ + range.begin, range.end - range.begin);
    copy.data = data;
  }

  void after_in_parent() {
    for_one_child_.clear();
    mutex_.unlock();
  }

  void after_in_child() {
    for (const Copy& copy : copies_->all) {
      // Beyond the copy the addresses stay reserved.
      ::mmap(copy.of->data_, copy.of->size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      if (copy.data) ::mremap(copy.data, copy.size(), copy.size(), MREMAP_MAYMOVE | MREMAP_FIXED, copy.of->data_);
    }
    copies_->all.clear();
    for (ForkCopied* memory : registered_) memory->is_copy_ = true;
    mutex_.unlock();
  }

  std::mutex mutex_;  // guards all members; held during a fork
  std::vector<ForkCopied*> registered_;
  SharedForkCopies::Copies for_one_child_;
  SharedForkCopies::Copies* copies_ = nullptr;  // those of the fork in progress
};

ForkCopied::ForkCopied(char* data, std::size_t size, std::function<std::vector<Range>()> used)
    : data_(data), size_(size), used_(std::move(used)) {
  ::madvise(data, size, MADV_DONTFORK);
  ForkHandlers::this_process().add(this);
}
ForkCopied::~ForkCopied() { ForkHandlers::this_process().remove(this); }

SharedForkCopies::SharedForkCopies()
    : copies_(std::make_unique<Copies>()), outer_(std::exchange(scope_of_thread, this)) {}
SharedForkCopies::~SharedForkCopies() { scope_of_thread = outer_; }

}  // namespace lockstep::comm::arena
