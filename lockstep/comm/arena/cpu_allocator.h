// libtorch's tensors in the arena.
#pragma once

namespace lockstep::comm {

/// From now on every CPU tensor of this process is born in Arena::process(); those that exist stay where they are.
/// Idempotent. When memory ends, tensors throw c10::OutOfMemoryError with ArenaFull's text.
void install_arena();
/// New tensors come from the allocator that was there before install_arena(); those in the arena stay valid.
void uninstall_arena();
bool arena_installed();

}  // namespace lockstep::comm
