// InstructionSet: chooses between functions that are compiled once per instruction set.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace lockstep::base::simd {

/// The instruction sets that vector loops are compiled for, from narrow to wide vectors. Each loop computes the same
/// bits with all of them.
enum class InstructionSet {
  kBaseline,  ///< what the compiler generates by default
  kAvx2,      ///< avx2 and f16c
  kAvx512,    ///< avx512f, avx512bw, avx512vl, avx512dq and f16c
};

/// Returns "baseline", "avx2" or "avx512".
const char* name(InstructionSet set);

/// Returns the instruction sets that this CPU supports, in the order of InstructionSet. kBaseline is always one.
std::vector<InstructionSet> supported_instruction_sets();

/// Returns the last of `supported`, or the one called `requested` if that is set. Throws UsageError if it is not in
/// `supported`. Pure.
InstructionSet choose_instruction_set(const std::optional<std::string>& requested,
                                      const std::vector<InstructionSet>& supported);

/// Returns the instruction set that this process uses: the one that LOCKSTEP_INSTRUCTION_SET names, or the widest that
/// the CPU supports. Throws UsageError if the variable names another one. Thread-safe; chosen once per process.
InstructionSet best_instruction_set();

/// Returns the argument that was compiled for `set`.
template <typename Table>
const Table& select(InstructionSet set, const Table& baseline, const Table& avx2, const Table& avx512) {
  switch (set) {
    case InstructionSet::kAvx512: return avx512;
    case InstructionSet::kAvx2: return avx2;
    case InstructionSet::kBaseline: break;
  }
  return baseline;
}

}  // namespace lockstep::base::simd
