// A C interface to the page of this process, for the Python hook, which watches ranks that do not use Lockstep.
//
// The library liblockstep_watch.so needs no libtorch, so one file serves every interpreter and every torch. No function
// throws. All have no effect in a child made by fork(), and before lockstep_watch_attach() has succeeded; they may be
// called from any thread, except that one thread at a time joins, leaves, begins and ends.
#pragma once

#include <cstdint>

extern "C" {

/// Maps the page that the agent made for this process. Returns 1, or 0 if there is none: the process was not started by
/// `lockstep run`, or it is a child of a rank.
int lockstep_watch_attach();

/// Publishes the identity of this rank and starts a thread that shows once per second that the process is alive. If the
/// rank was published before, it only joins its world again. `transport` is a text for `lockstep status`.
void lockstep_watch_join(int rank, int world_size, const char* job, const char* transport);

/// The rank leaves its world: other ranks no longer wait for it. Stops the thread.
void lockstep_watch_leave();

/// Records a local port of a TCP connection of this process: errors of Gloo name a peer by such a port.
void lockstep_watch_uses_port(int port);

/// Counts a look at the operations, which shows how long the rank computes between them. `is_pending`: one was not
/// complete.
void lockstep_watch_look(int is_pending);
/// Counts a step of an optimizer, a batch, or another sign of progress.
void lockstep_watch_step();
void lockstep_watch_batch();
void lockstep_watch_alive();

/// Records that the rank waits for other ranks in operation `seq` of the group `channel`. Returns a number for end(); 0
/// if nothing was recorded.
std::uint64_t lockstep_watch_begin(const char* channel, std::uint64_t seq, const char* kind, const char* dtype,
                                   std::uint64_t bytes);
/// The wait has ended. No effect for 0.
void lockstep_watch_end(std::uint64_t number);

}  // extern "C"
