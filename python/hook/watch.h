// A C interface to the page of this process, for the Python hook, which watches ranks that do not use Lockstep.
//
// The library liblockstep_watch.so needs no libtorch, so one file serves every interpreter and every torch. No function
// throws. All but lockstep_watch_guard_forks() have no effect in a child made by fork(), and before
// lockstep_watch_attach() has succeeded; they may be called from any thread, except that one thread at a time joins,
// leaves, begins and ends.
#pragma once

#include <cstdint>

extern "C" {

/// Maps the page that the agent made for this process. Returns 1, or 0 if there is none: the process was not started by
/// `lockstep run`, or it is a child of a rank.
int lockstep_watch_attach();

/// Publishes the identity of this rank and starts a thread that shows once per second that the process is alive. With
/// `has_heartbeat`, Lockstep itself does this in this process, and decides when the rank leaves its world: only the
/// text for `lockstep status`, `transport`, is published anew. No effect if the process was published as another rank,
/// or as one of a world of another size, or, without `has_heartbeat`, by Lockstep itself.
void lockstep_watch_join(int rank, int world_size, const char* job, const char* transport, int has_heartbeat);

/// The rank leaves its world: other ranks no longer wait for it. Stops the thread. All waits have ended.
void lockstep_watch_leave();

/// Records a local port of a TCP connection of this process: errors of Gloo name a peer by such a port.
void lockstep_watch_uses_port(int port);

/// Counts a look at the operations, which shows how long the rank computes between them. `is_pending`: one was not
/// complete. The calling thread becomes one of Lockstep's own (base/thread.h).
void lockstep_watch_look(int is_pending);
/// Counts a step of an optimizer, a batch, or another sign of progress.
void lockstep_watch_step();
void lockstep_watch_batch();
void lockstep_watch_alive();

/// Shows which exception the program is handling while it waits: "ValueError: bad value"; "" for none.
void lockstep_watch_handles(const char* exception);

/// Records that the rank waits for other ranks in operation `seq` of the group `channel`. Returns a number for end(); 0
/// if nothing was recorded.
std::uint64_t lockstep_watch_begin(const char* channel, std::uint64_t seq, const char* kind, const char* dtype,
                                   std::uint64_t bytes);
/// The wait has ended. No effect for 0.
void lockstep_watch_end(std::uint64_t number);

/// From now on, fork() waits until no other thread holds the lock of the interpreter's list of thread states. CPython
/// before 3.10.15 and 3.11.10 takes this lock in the child before it makes it anew, so a child that is forked while
/// another thread holds it blocks forever in os.fork() (github.com/python/cpython/issues/112275). A thread holds it
/// without the GIL while it makes a thread state, as a thread of torch does that drops the last reference to a tensor.
/// For an interpreter of one of these versions only. Returns the lock; null, without any effect, if it was not found.
void* lockstep_watch_guard_forks();

}  // extern "C"
