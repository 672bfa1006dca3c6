// Makes libtorch allocate CPU tensors in the arena.
#pragma once

namespace lockstep::comm::arena {

/// From now on libtorch allocates every new CPU tensor of this process in Arena::this_process(); existing tensors stay
/// where they are. Idempotent. May be called from any thread. When memory runs out, the allocation throws
/// c10::OutOfMemoryError with the text of ArenaFull.
void install_arena();
/// Restores the allocator that was in use before install_arena(). Tensors in the arena stay valid. Idempotent.
void uninstall_arena();

}  // namespace lockstep::comm::arena
