// A rank of a job in which one rank has a fault.
//   fault_probe FAULT RANK [SECONDS [TEXT]]
// All ranks run three all_reduces. Then RANK has FAULT, and the others wait for it in a fourth one:
//
//   loop | deadlock | short_deadline   forever; with short_deadline, the fourth all_reduce has a deadline of SECONDS
//   kernel                             forever, in the kernel (state D), where no debugger can attach
//   stop                               stops itself with SIGSTOP
//   after                              loops after all ranks have finished the fourth all_reduce; prints a line before
//                                      init(), and another one before the loop
//   work | alive | busy                works for SECONDS: without reports, with calls of world.alive(), or under
//                                      world.busy()
//   throw | odd | usage | memory | allocate  an exception under lockstep::main()
//   text                               an exception with TEXT
//   clean_up | nested                  an exception whose handler calls barrier(), or throws another one
//   bare                               an uncaught exception without lockstep::main()
//   segv | abort | exit                ends the process
//
// A rank that receives a CommError prints "error: CAUSE TEXT" and exits with 69.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "lockstep/comm/group.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/uncaught_exception.h"

namespace {

using lockstep::comm::Group;

struct OddException {};  // not a std::exception

volatile bool run_forever = true;

[[gnu::noinline]] void loop_forever() {
  while (run_forever) {
  }
}

[[gnu::noinline]] void self_deadlock() {
  std::timed_mutex mutex;
  mutex.lock();
  while (!mutex.try_lock_for(std::chrono::hours(1))) {
  }
}

/// Blocks in the kernel: the parent of a vfork() sleeps uninterruptibly until the child exits, but can be killed. Uses
/// the system call, because ThreadSanitizer replaces vfork() with fork().
void block_in_kernel() {
  if (::syscall(SYS_clone, CLONE_VFORK | CLONE_VM | SIGCHLD, 0, 0, 0, 0) != 0) return;
  for (;;) ::pause();
}

/// Uses a core for `seconds`.
void compute(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

/// Works for `seconds`. Reports progress every 20 ms if `reports_progress`.
void work(const Group& world, double seconds, bool reports_progress) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (reports_progress) world.alive();
  }
}

void inject_fault(const std::string& what, const Group& world, double seconds, const char* text) {
  if (what == "loop" || what == "short_deadline") loop_forever();
  if (what == "deadlock") self_deadlock();
  if (what == "kernel") block_in_kernel();
  if (what == "stop") ::raise(SIGSTOP);
  if (what == "work" || what == "alive") work(world, seconds, what == "alive");
  if (what == "compute") compute(seconds);
  if (what == "busy") {
    const auto busy = world.busy("evaluate");
    work(world, seconds, false);
  }
  if (what == "odd") throw OddException{};
  if (what == "throw" || what == "bare") throw std::runtime_error("no such thing\nand more of it");
  if (what == "text") throw std::runtime_error(text);
  if (what == "clean_up" || what == "nested") {
    try {
      throw std::runtime_error("no such label");
    } catch (...) {
      if (what == "clean_up") world.barrier();
      std::throw_with_nested(std::logic_error("cannot load the batch"));
    }
  }
  if (what == "usage") throw lockstep::base::UsageError("that is not allowed", "do this");
  if (what == "memory") throw std::bad_alloc();
  if (what == "allocate") at::empty({std::int64_t{1} << 55});
  if (what == "segv") ::raise(SIGSEGV);
  if (what == "abort") {
    std::fprintf(stderr, "a reason\n");
    std::abort();
  }
  if (what == "exit") ::_exit(9);
}

int run(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const int rank = argc > 2 ? std::atoi(argv[2]) : 0;
  const double seconds = argc > 3 ? std::atof(argv[3]) : 0;
  if (what == "after") {
    std::puts("begins");
    std::fflush(stdout);
  }
  Group world = lockstep::comm::init();
  const at::Tensor tensor = at::ones({1024});
  try {
    for (int i = 0; i < 3; ++i) world.all_reduce(tensor, lockstep::comm::ReduceOp::kMean, {.name = "votes"});
    if (world.rank() == rank) inject_fault(what, world, seconds, argc > 4 ? argv[4] : "");
    lockstep::comm::CallOptions last{.name = "votes"};
    if (what == "short_deadline") last.deadline = lockstep::base::Deadline::in(std::chrono::duration<double>(seconds));
    world.all_reduce(tensor, lockstep::comm::ReduceOp::kSum, last);
    if (what == "after" && world.rank() == rank) {
      std::puts("loops");
      loop_forever();
    }
    std::printf("sum %g\n", tensor.sum().item<double>());
    return 0;
  } catch (const lockstep::base::CommError& error) {
    if (what == "clean_up" && world.rank() == rank) throw;
    std::printf("error: %s %s\n", std::string(name(error.cause())).c_str(), error.what());
    std::fflush(stdout);
    return 69;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "bare") == 0) return run(argc, argv);
  return lockstep::comm::main(argc, argv, run);
}
