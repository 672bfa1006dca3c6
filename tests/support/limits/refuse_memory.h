// Makes the kernel refuse shared memory, as it does when it may not overcommit memory (vm.overcommit_memory is 2), or
// interrupt its allocation, as it does when a signal arrives.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>

namespace lockstep::tests {

/// From now on fallocate() of at least `min_bytes` fails with `error` in this thread and in those that it starts.
/// Cannot be undone. Returns whether the kernel permits that.
inline bool refuse_fallocate(int error = ENOSPC, unsigned min_bytes = 0) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args) + 3 * sizeof(__u64)),  // the low half on x86
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, min_bytes, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = sizeof filter / sizeof *filter, .filter = filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace lockstep::tests
