#include "lockstep/comm/hierarchy/cross_host_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/shm/reduce.h"

namespace lockstep::comm {
namespace {

using base::Deadline;

// Of a piece, at most; a smaller slice is cut into kPieces, so that the wire is busy while a part is added, but not
// below the least.
constexpr std::size_t kPieceBytes = 2 << 20;
constexpr std::size_t kLeastPieceBytes = 256 << 10;
// Pieces whose parts are on their way to their owners, and from them.
constexpr std::size_t kScattering = 3;
constexpr std::size_t kGathering = 3;
constexpr std::size_t kPieces = kScattering + kGathering + 1;
constexpr auto kSlice = std::chrono::milliseconds(20);

char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

at::Tensor first_bytes(const at::Tensor& tensor, std::size_t bytes) {
  return tensor.narrow(0, 0, static_cast<std::int64_t>(bytes));
}

}  // namespace

Column::Column(std::shared_ptr<Transport> outer, int host, int num_hosts, const std::atomic<bool>& stop)
    : outer_(std::move(outer)),
      host_(host),
      num_hosts_(static_cast<std::size_t>(num_hosts)),
      stop_(stop),
      pieces_(kPieces) {}

void Column::wait(const PendingPtr& pending) const {
  while (!pending->wait_until(Deadline::in(kSlice)))
    if (stop_.load()) throw std::runtime_error("the transport was aborted");
  if (const auto error = pending->error()) std::rethrow_exception(error);
  base::RankPage::process().alive.fetch_add(1, std::memory_order_relaxed);  // a long operation gets on piece by piece
}

PendingPtr Column::start(Kind kind, const at::Tensor& input, const at::Tensor& output, int root) {
  return outer_->start({.kind = kind, .input = input, .output = output, .root = root, .seq = ++seq_});
}

void Column::reserve(std::size_t piece_bytes) {
  const auto bytes = static_cast<std::int64_t>(piece_bytes);
  for (Piece& piece : pieces_) {
    if (piece.sent.defined() && piece.sent.numel() >= bytes) continue;
    for (at::Tensor* tensor : {&piece.sent, &piece.received, &piece.part, &piece.all})
      *tensor = at::empty({bytes}, at::kByte);
  }
}

void Column::all_reduce(const Slices& slices, ReduceOp op, int divisor, at::ScalarType wire) {
  if (slices.dtype != at::kFloat) wire = slices.dtype;
  const std::size_t unit = 64 * num_hosts_;
  const std::size_t wanted = std::clamp(slices.count * c10::elementSize(wire) / kPieces, kLeastPieceBytes, kPieceBytes);
  const std::size_t step = (std::min(wanted / c10::elementSize(wire), slices.count) + unit - 1) / unit * unit;
  reserve(step * c10::elementSize(wire));
  if (wire != slices.dtype) wide_ = at::empty({static_cast<std::int64_t>(step)}, at::kFloat);
  const std::size_t num_pieces = slices.count == 0 ? 0 : (slices.count + step - 1) / step;
  // What starts when is a matter of i alone: the members of a column start the same operations in the same order.
  for (std::size_t i = 0; i < num_pieces + kScattering + kGathering; ++i) {
    if (i < num_pieces) {
      Piece& piece = pieces_[i % kPieces];
      piece.first = i * step;
      piece.count = std::min(step, slices.count - piece.first);
      piece.part_count = (piece.count + num_hosts_ - 1) / num_hosts_;
      scatter(slices, op, wire, piece);
    }
    if (i >= kScattering && i - kScattering < num_pieces)
      gather(slices, op, divisor, wire, pieces_[(i - kScattering) % kPieces]);
    if (i >= kScattering + kGathering) store(slices, wire, pieces_[(i - kScattering - kGathering) % kPieces]);
  }
}

/// Reduces the piece of this host and sends each host its part.
void Column::scatter(const Slices& slices, ReduceOp op, at::ScalarType wire, Piece& piece) {
  const std::size_t element = c10::elementSize(slices.dtype);
  c10::SmallVector<const void*, 16> inputs;
  for (const char* local : slices.locals) inputs.push_back(local + piece.first * element);
  void* sum = wire == slices.dtype ? bytes_of(piece.sent) : bytes_of(wide_);
  reduce({.dtype = slices.dtype,
          .op = op,
          .inputs = inputs.data(),
          .num_inputs = inputs.size(),
          .outputs = &sum,
          .num_outputs = 1,
          .count = piece.count});
  if (wire != slices.dtype)
    convert({.from = slices.dtype, .to = wire, .input = sum, .output = bytes_of(piece.sent), .count = piece.count});
  const std::size_t on_wire = c10::elementSize(wire);
  const std::size_t bytes = piece.part_count * num_hosts_ * on_wire;
  std::memset(bytes_of(piece.sent) + piece.count * on_wire, 0, bytes - piece.count * on_wire);
  piece.scattered = start(Kind::kAllToAll, first_bytes(piece.sent, bytes), first_bytes(piece.received, bytes));
}

/// Adds what the hosts sent of this host's part and gives the result to all.
void Column::gather(const Slices&, ReduceOp op, int divisor, at::ScalarType wire, Piece& piece) {
  wait(piece.scattered);
  const std::size_t part_bytes = piece.part_count * c10::elementSize(wire);
  c10::SmallVector<const void*, 16> inputs;
  for (std::size_t host = 0; host < num_hosts_; ++host) inputs.push_back(bytes_of(piece.received) + host * part_bytes);
  void* sum = bytes_of(piece.part);
  reduce({.dtype = wire,
          .op = op,
          .inputs = inputs.data(),
          .num_inputs = inputs.size(),
          .outputs = &sum,
          .num_outputs = 1,
          .count = piece.part_count,
          .divisor = divisor});
  piece.gathered =
      start(Kind::kAllGather, first_bytes(piece.part, part_bytes), first_bytes(piece.all, part_bytes * num_hosts_));
}

void Column::store(const Slices& slices, at::ScalarType wire, Piece& piece) {
  wait(piece.gathered);
  for (char* local : slices.locals)
    convert({.from = wire,
             .to = slices.dtype,
             .input = bytes_of(piece.all),
             .output = local + piece.first * c10::elementSize(slices.dtype),
             .count = piece.count});
}

void Column::broadcast(const Slices& slices, int root, std::size_t source) {
  const std::size_t element = c10::elementSize(slices.dtype);
  const std::size_t bytes = slices.count * element;
  const std::size_t num_pieces = (bytes + kPieceBytes - 1) / kPieceBytes;
  char* own = slices.locals[host_ == root ? source : 0];
  std::vector<PendingPtr> under_way;
  for (std::size_t i = 0; i < num_pieces + kScattering; ++i) {
    if (i < num_pieces) {
      const std::size_t first = i * kPieceBytes;
      const at::Tensor piece =
          at::from_blob(own + first, {static_cast<std::int64_t>(std::min(kPieceBytes, bytes - first))}, at::kByte);
      under_way.push_back(start(Kind::kBroadcast, piece, piece, root));
    }
    if (i < kScattering) continue;
    const std::size_t first = (i - kScattering) * kPieceBytes;
    wait(under_way[i - kScattering]);
    for (char* local : slices.locals)
      if (local != own) std::memcpy(local + first, own + first, std::min(kPieceBytes, bytes - first));
  }
}

}  // namespace lockstep::comm
