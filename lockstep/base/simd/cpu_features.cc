#include "lockstep/base/simd/cpu_features.h"

#include "lockstep/base/env.h"
#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"

namespace lockstep::base::simd {

static_assert(kInstructionSets.size() == static_cast<std::size_t>(InstructionSet::kAvx512) + 1, "in the same order");
const char* name(InstructionSet set) { return kInstructionSets[static_cast<std::size_t>(set)]; }

std::vector<InstructionSet> supported_instruction_sets() {
  std::vector<InstructionSet> supported{InstructionSet::kBaseline};
#if defined(__x86_64__)
  const bool f16c = __builtin_cpu_supports("f16c");
  if (f16c && __builtin_cpu_supports("avx2")) supported.push_back(InstructionSet::kAvx2);
  if (f16c && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    supported.push_back(InstructionSet::kAvx512);
#endif
  return supported;
}

InstructionSet choose_instruction_set(const std::optional<std::string>& requested,
                                      const std::vector<InstructionSet>& supported) {
  if (!requested) return supported.back();
  std::string names;
  for (const InstructionSet set : supported) {
    if (*requested == name(set)) return set;
    names += (names.empty() ? "" : ", ") + std::string(name(set));
  }
  throw UsageError("LOCKSTEP_INSTRUCTION_SET is " + quoted(*requested, 80) +
                   "; expected an instruction set that this CPU supports: " + names);
}

InstructionSet best_instruction_set() {
  static const InstructionSet chosen =
      choose_instruction_set(Env::this_process().lockstep_instruction_set, supported_instruction_sets());
  return chosen;
}

}  // namespace lockstep::base::simd
