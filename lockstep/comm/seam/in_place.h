// Gradients that are reduced where they lie, by a transport whose ranks reach each other's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "lockstep/comm/seam/pending.h"

namespace lockstep::comm {

/// A fixed list of parts, the same on all ranks. One round after another: open(), show() for each part that this rank has, in any order,
/// then finish(). Neighbours write into what was shown from then until the end of the round, or for ever if the round is never ended.
class InPlaceReducer {
 public:
  virtual ~InPlaceReducer() = default;

  /// Whether the other ranks can read and write at this address.
  virtual bool reaches(const void* address) const = 0;
  /// A tensor that they can reach, like `part` and in `strides`, contents unspecified.
  virtual at::Tensor make_reachable(const at::Tensor& part, at::IntArrayRef strides) = 0;

  virtual void open() = 0;
  /// Part `index` lies at `data`, contiguous or in the strides that all ranks use for it; null: this rank has a sparse gradient, which is
  /// not reduced here. `fresh` as in Exchange::ready(). What all ranks have shown may be reduced at once, this rank's share of it.
  virtual void show(std::size_t index, void* data, bool fresh) = 0;
  /// This rank has shown what it has. Done when every part that is fresh somewhere holds the mean, on each rank that showed it: the sum
  /// in the order of the ranks of what was shown, divided by the number of ranks.
  virtual PendingPtr finish() = 0;

  // After finish() is done, until the next open():
  /// Some rank has shown it, fresh.
  virtual bool dense(std::size_t index) const = 0;
  /// Some rank has a sparse gradient.
  virtual bool sparse(std::size_t index) const = 0;
  /// Where this rank can read the mean of a dense part that it has not shown itself.
  virtual const void* mean(std::size_t index) const = 0;
  /// Some rank has not shown a part that is dense: it reads mean(), and the others must let it.
  virtual bool anybody_reads() const = 0;
};

}  // namespace lockstep::comm
