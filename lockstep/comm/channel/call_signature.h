// What a rank has called, in 256 bytes: compared with the other ranks' before any data moves.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/comm/interface/collective.h"

namespace lockstep::comm {

/// Travels as raw bytes between ranks of one build (job::join() has compared the builds).
struct CallSignature {
  static constexpr int kMaxDims = 12;
  static constexpr std::size_t kNameBytes = 117;

  std::uint64_t seq;
  std::uint64_t name_hash;
  std::int64_t sizes[kMaxDims];
  std::int32_t root;
  std::int16_t dtype;
  CollectiveKind kind;
  ReduceOp op;
  std::int8_t wire;
  std::int8_t device;  // type of the tensors' device
  std::uint8_t dims;
  char name[kNameBytes];  // the name's beginning, NUL-terminated
};
static_assert(sizeof(CallSignature) == 240 && std::has_unique_object_representations_v<CallSignature>);

/// The shape that a call tells, of one of its tensors, of kMaxDims dimensions at most; and whether the ranks may differ
/// in it.
struct SignatureShape {
  SignatureShape() = default;
  explicit SignatureShape(const at::Tensor& tensor, bool ranks_may_differ = false);

  std::int64_t sizes[CallSignature::kMaxDims];  // as many as `dims`
  std::int16_t dtype = -1;
  std::int8_t device = 0;
  std::uint8_t dims = 0;
  bool may_shapes_differ = false;
};

/// A hash of all that is compared.
std::uint64_t key(const CallSignature& call);

CallSignature make_signature(const Collective& op, const SignatureShape& shape);

/// "all_reduce(float32[1024])", with the name in front of the tensor when there is one: "all_reduce(fc.weight:
/// float32[1024])".
std::string describe(const CallSignature& call);

/// Where ranks differ: the two to name. `odd` is the rank at fault as far as a vote can tell, `other` one of the
/// majority.
struct CallMismatch {
  int suspect;
  int other;
};

/// Pure. Nothing when all agree. Ranks whose shapes may differ are compared in the rest.
bool find_mismatch(const std::vector<CallSignature>& calls, bool sizes_may_differ, CallMismatch& difference);

}  // namespace lockstep::comm
