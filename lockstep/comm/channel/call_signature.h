// CallSignature: a description of a rank's call in 240 bytes. Ranks compare their signatures before any data moves.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/comm/interface/collective.h"

namespace lockstep::comm::channel {

/// Sent as raw bytes between ranks of the same build (job::join() has compared the builds).
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
  std::int8_t wire_dtype;
  std::int8_t device;  // type of the tensors' device
  std::uint8_t dims;
  char name[kNameBytes];  // beginning of the name, NUL-terminated
};

constexpr std::int64_t kSignatureBytes = sizeof(CallSignature);
static_assert(sizeof(CallSignature) == 240 && std::has_unique_object_representations_v<CallSignature>);

/// The shape, dtype and device of one tensor of a call, as the signature contains them. The tensor has at most kMaxDims
/// dimensions.
struct SignatureShape {
  SignatureShape() = default;
  explicit SignatureShape(const at::Tensor& tensor, bool ranks_may_differ = false);

  std::int64_t sizes[CallSignature::kMaxDims];  // the first `dims` are valid
  std::int16_t dtype = -1;
  std::int8_t device = 0;
  std::uint8_t dims = 0;
  bool may_shapes_differ = false;  // the ranks may pass different shapes
};

/// Returns a hash of all fields that are compared.
std::uint64_t hash_signature(const CallSignature& call);

CallSignature make_signature(const Collective& op, const SignatureShape& shape);

/// Returns "all_reduce(float32[1024])", or with a name "all_reduce(fc.weight: float32[1024])".
std::string describe(const CallSignature& call);

/// Two ranks whose signatures differ: rank 0 and the first rank that differs from it. `suspect` is the one that fewer
/// ranks agree with; in a tie it is not rank 0. `other` is the other one.
struct CallMismatch {
  int suspect;
  int other;
};

/// Returns false if all signatures agree; otherwise fills `difference` and returns true. With `sizes_may_differ` the
/// shapes are not compared. Pure.
bool find_mismatch(const std::vector<CallSignature>& calls, bool sizes_may_differ, CallMismatch& difference);

}  // namespace lockstep::comm::channel
