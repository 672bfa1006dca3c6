#include "lockstep/comm/channel/call_signature.h"

#include <algorithm>
#include <functional>

#include "lockstep/base/check.h"

namespace lockstep::comm::channel {
namespace {

/// FNV-1a, 64 bits. Unlike std::hash, it is the same on all hosts.
std::uint64_t hash(const std::string& text) {
  std::uint64_t value = 14695981039346656037u;
  for (const unsigned char c : text) value = (value ^ c) * 1099511628211u;
  return value;
}

/// Half a round of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). It is a
/// bijection, and every value that is mixed in passes through at least one more half.
std::uint64_t mix(std::uint64_t value) {
  value *= 0xbf58476d1ce4e5b9u;
  return value ^ (value >> 29);
}

bool is_same_call(const CallSignature& a, const CallSignature& b, bool sizes_may_differ) {
  return a.seq == b.seq && a.name_hash == b.name_hash && a.root == b.root && a.dtype == b.dtype && a.kind == b.kind &&
         a.op == b.op && a.wire_dtype == b.wire_dtype && a.device == b.device &&
         (sizes_may_differ || (a.dims == b.dims && std::equal(a.sizes, a.sizes + a.dims, b.sizes)));
}

}  // namespace

std::uint64_t hash_signature(const CallSignature& call) {
  const auto small = static_cast<std::uint64_t>(static_cast<std::uint32_t>(call.root)) << 32 |
                     static_cast<std::uint64_t>(static_cast<std::uint16_t>(call.dtype)) << 16 |
                     static_cast<std::uint64_t>(call.kind) << 8 | static_cast<std::uint64_t>(call.op) << 4 | call.dims;
  std::uint64_t value = mix(mix(call.seq + 0x9e3779b97f4a7c15u) ^ call.name_hash);
  value = mix(mix(value ^ small) ^
              (static_cast<std::uint64_t>(call.wire_dtype) | static_cast<std::uint64_t>(call.device) << 8));
  for (int d = 0; d < call.dims; ++d) value = mix(value ^ static_cast<std::uint64_t>(call.sizes[d]));
  return mix(value);
}

SignatureShape::SignatureShape(const at::Tensor& tensor, bool ranks_may_differ)
    : dtype(static_cast<std::int16_t>(tensor.scalar_type())),
      device(static_cast<std::int8_t>(tensor.device().type())),
      dims(static_cast<std::uint8_t>(tensor.dim())),
      may_shapes_differ(ranks_may_differ) {
  LOCKSTEP_CHECK(tensor.dim() <= CallSignature::kMaxDims);  // Group rejects more
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), sizes);
}

CallSignature make_signature(const Collective& op, const SignatureShape& shape) {
  CallSignature call;  // every byte is set below, because all bytes are sent
  call.seq = op.seq;
  call.name_hash = hash(op.name);
  std::fill(std::copy(shape.sizes, shape.sizes + shape.dims, call.sizes), std::end(call.sizes), 0);
  call.root = op.root;
  call.dtype = shape.dtype;
  call.kind = op.kind;
  call.op = op.op;
  call.wire_dtype = static_cast<std::int8_t>(op.wire_dtype);
  call.device = shape.device;
  call.dims = shape.dims;
  std::size_t length = std::min(op.name.size(), CallSignature::kNameBytes - 1);
  // Truncate between characters: a UTF-8 continuation byte belongs to the byte before it.
  while (length > 0 && length < op.name.size() && (static_cast<unsigned char>(op.name[length]) & 0xC0) == 0x80)
    --length;
  std::fill(std::copy_n(op.name.data(), length, call.name), std::end(call.name), '\0');
  return call;
}

std::string describe(const CallSignature& call) {
  std::string text(name(call.kind));
  text += "(";
  if (call.name[0]) text += std::string(call.name) + (call.dtype >= 0 ? ": " : "");
  if (call.dtype >= 0) {
    text += std::string(name(static_cast<at::ScalarType>(call.dtype))) + "[";
    for (int d = 0; d < call.dims; ++d) text += (d ? "," : "") + std::to_string(call.sizes[d]);
    text += "]";
    if (call.device != static_cast<std::int8_t>(at::kCPU))
      text += " on " + c10::DeviceTypeName(static_cast<at::DeviceType>(call.device), true);
  }
  const bool has_root = call.kind == CollectiveKind::kBroadcast || call.kind == CollectiveKind::kReduce ||
                        call.kind == CollectiveKind::kGather || call.kind == CollectiveKind::kScatter;
  const bool is_reduction = call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduce ||
                            call.kind == CollectiveKind::kReduceScatter;
  if (has_root) text += ", root " + std::to_string(call.root);
  if (is_reduction && call.op != ReduceOp::kSum) text += ", " + std::string(name(call.op));
  if (is_reduction && call.wire_dtype != static_cast<std::int8_t>(at::kFloat))
    text += ", as " + std::string(name(static_cast<at::ScalarType>(call.wire_dtype)));
  return text + ")";
}

bool find_mismatch(const std::vector<CallSignature>& calls, bool sizes_may_differ, CallMismatch& difference) {
  const auto agrees = [&](std::size_t a, std::size_t b) { return is_same_call(calls[a], calls[b], sizes_may_differ); };
  std::size_t different = 1;
  while (different < calls.size() && agrees(0, different)) ++different;
  if (different >= calls.size()) return false;
  // Rank 0 is the suspect if more ranks agree with the rank that differs from it.
  std::size_t with_zero = 0;
  std::size_t with_other = 0;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    with_zero += agrees(0, rank);
    with_other += agrees(different, rank);
  }
  difference = with_other > with_zero ? CallMismatch{0, static_cast<int>(different)}
                                      : CallMismatch{static_cast<int>(different), 0};
  return true;
}

}  // namespace lockstep::comm::channel
