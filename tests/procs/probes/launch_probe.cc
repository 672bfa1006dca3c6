// A rank that prints a part of its process state.
//   launch_probe fds | cpus | stdin | session | signals | flood N | launch RANKS [WORD...]
// flood: prints N lines. launch: calls lockstep::launch(), and prints the rank and the words.
#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/launch/launch.h"

namespace {

int print_descriptors() {
  DIR* folder = ::opendir("/proc/self/fd");
  while (const dirent* entry = ::readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    if (entry->d_name[0] == '.' || fd == ::dirfd(folder)) continue;
    char target[64] = "";
    [[maybe_unused]] const auto size = ::readlinkat(::dirfd(folder), entry->d_name, target, sizeof target - 1);
    std::printf(std::strstr(target, "memfd:lockstep-rank") ? "page\n" : "fd %d\n", fd);
  }
  ::closedir(folder);
  return 0;
}

int print_cpus() {
  cpu_set_t set;
  ::sched_getaffinity(0, sizeof set, &set);
  std::string list = "cpus";
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) list += " " + std::to_string(cpu);
  std::printf("%s\n", list.c_str());
  return 0;
}

int print_stdin() {
  char c;
  std::printf("stdin %zd\n", ::read(STDIN_FILENO, &c, 1));
  return 0;
}

int print_session() {
  int signal = 0;
  ::prctl(PR_GET_PDEATHSIG, &signal);
  std::printf("leader %d group %d deathsig %d\n", ::getsid(0) == ::getpid(), ::getpgrp() == ::getpid(), signal);
  return 0;
}

int print_signals() {
  sigset_t mask;
  ::sigprocmask(SIG_BLOCK, nullptr, &mask);
  int count = 0;
  for (int number = 1; number < 32; ++number) {
    struct sigaction action{};
    ::sigaction(number, nullptr, &action);
    count += sigismember(&mask, number) == 1 || action.sa_handler == SIG_IGN;
  }
  std::printf("signals blocked or ignored: %d\n", count);
  return 0;
}

/// Prints lines of 100 bytes as fast as possible.
int print_many_lines(int lines) {
  const std::string text(99, 'x');
  for (int i = 0; i < lines; ++i) std::puts(text.c_str());
  return 0;
}

int launch(int argc, char** argv) {
  const auto& rank = lockstep::base::Env::this_process().lockstep_rank;
  try {
    lockstep::launcher::launch({.ranks = std::atoi(argv[2])}, argc, argv);
  } catch (const lockstep::base::Error& error) {
    std::printf("error: %s\n", error.what());
    return 1;
  }
  std::printf("rank %s:", rank ? rank->c_str() : "none");
  for (int i = 3; i < argc; ++i) std::printf(" <%s>", argv[i]);
  std::printf("\n");
  return rank && *rank == "1" && argc > 3 && std::strcmp(argv[3], "fail") == 0 ? 9 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "fds") return print_descriptors();
  if (what == "cpus") return print_cpus();
  if (what == "stdin") return print_stdin();
  if (what == "session") return print_session();
  if (what == "signals") return print_signals();
  if (what == "flood" && argc > 2) return print_many_lines(std::atoi(argv[2]));
  if (what == "launch" && argc > 2) return launch(argc, argv);
  return 2;
}
