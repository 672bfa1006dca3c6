"""Every wait has a deadline, or a comment on its line or at most two lines above: // bounded: REASON."""

import re

from source_tree import Finding, code_lines

NAKED = {
    r"\bp?poll\s*\([^;]*,\s*-1\s*\)": "poll without a limit",
    r"\bppoll\s*\([^;]*,\s*(?:nullptr|NULL)\s*,": "ppoll without a limit",
    r"\bepoll_p?wait\s*\([^;]*,\s*-1\s*[,)]": "epoll_wait without a limit",
    r"(?:\.|->)wait\s*\(\s*\)": "wait() without a deadline",
    r"(?:\.|->)wait\s*\(\s*\w*(?:lock|guard)\w*\s*[,)]": "waits for a condition without a deadline: use wait_until()",
    r"(?:\.|->)join\s*\(\s*\)": "joins a thread without a bound",
    r"\bwaitpid\s*\([^;]*,\s*0\s*\)": "waitpid without WNOHANG",
    r"(?<![\w.>:])(?:::)?wait\s*\(\s*(?:&\s*\w+|nullptr|NULL)\s*\)": "wait(2) for any child",
    r"\bwaitid\s*\((?!.*WNOHANG)": "waitid without WNOHANG",
    r"\bflock\s*\((?!.*LOCK_NB)[^;]*LOCK_(?:EX|SH)": "flock without LOCK_NB",
    r"\bF_SETLKW\b": "a record lock that waits",
    r"\bDeadline::never\s*\(\s*\)\s*[,)]": "Deadline::never() is passed to a wait",
}
PATTERNS = [(re.compile(pattern), what) for pattern, what in NAKED.items()]
REASON = re.compile(r"//.*\bbounded: \w+")


def check(tree):
    for path in tree.cpp("lockstep", "programs", "examples", "bench"):
        raw = tree.lines(path)
        for number, line in code_lines(tree.text(path)):
            for pattern, what in PATTERNS:
                if pattern.search(line) and not any(REASON.search(text) for text in raw[max(0, number - 3) : number]):
                    yield Finding(
                        path, number, f"{what}; add a deadline, or state what ends the wait: // bounded: REASON"
                    )


SAMPLE = {
    "lockstep/job/a.cc": """\
poll(fds, 1, -1); @flag
poll(fds, n(), deadline.poll_ms());
epoll_wait(fd, events, 8, -1); @flag
work.wait(deadline);
work->wait(); @flag
condition.wait(lock, [&] { return done; }); @flag
condition.wait_until(lock, deadline.when());
thread.join(); @flag
thread.join();  // bounded: its loop ends when the socket is closed


// bounded: the child has exited, as its pidfd told
waitpid(pid, &status, 0);


waitpid(pid, &status, 0); @flag
waitpid(pid, &status, WNOHANG);
::wait(nullptr); @flag
flock(fd, LOCK_EX); @flag
flock(fd, LOCK_EX | LOCK_NB);
store.get(key, Deadline::never()); @flag
Deadline kill_at_ = Deadline::never();
// thread.join(); poll(x, 1, -1)
thread.join();  // bounded: @flag
""",
    "lockstep/base/deadline.h": "  static Deadline never() { return Deadline(Clock::time_point::max()); }\n",
}
