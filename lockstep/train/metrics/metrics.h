// Measured values as sums and counts, so that their means are exact whatever the sizes of batches and the shares of
// ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/train/loggers/named_values.h"

namespace lockstep::train {

/// What was added since the last clear(). One thread.
///
/// A mean over ranks is the sum of all sums by the sum of all counts, never a mean of means: a rank with fewer samples
/// counts less, one without any does not count.
class Metrics {
 public:
  /// `mean` is that of `count` samples: a scalar tensor, or a number. A tensor on a device is read when somebody wants
  /// to know, and not here. Its graph is not kept. Throws UsageError for a tensor of more than one element, for an
  /// empty name, and for a count that is not above 0.
  void add(const std::string& name, const at::Tensor& mean, double count = 1);
  void add(const std::string& name, double mean, double count = 1);

  struct Sum {
    double sum = 0, count = 0;
    bool operator==(const Sum&) const = default;
  };
  /// Of this rank, by name. Waits for its device where tensors were added there.
  std::map<std::string, Sum> sums() const;
  /// Adds those that another time or place has measured, as from a checkpoint.
  void add(const std::map<std::string, Sum>& sums);
  void clear() { entries_.clear(); }
  bool empty() const { return entries_.empty(); }

  /// The names whose values were infinite or NaN when they were added, each once, and not those on a device; they are
  /// not asked for twice.
  std::vector<std::string> take_non_finite_names() { return std::exchange(non_finite_names_, {}); }

 private:
  struct Entry {
    Sum sum;                // of numbers; and of tensors their count
    at::Tensor device_sum;  // double, the sum of tensors; undefined when there was none
  };
  Entry& find_or_add(const std::string& name, double count);
  std::map<std::string, Entry> entries_;
  std::vector<std::string> non_finite_names_;
};

/// Means over all ranks, by name, those that no rank has measured left out. All ranks call it alike, in one exchange,
/// with whatever names each has. The same bits on every rank: sums are added in rank order.
NamedValues mean_over_ranks(const Metrics& metrics, comm::Group& group);

/// For the exchange: one line a value, "SUM COUNT NAME", numbers in hexadecimal so that they are the same bits.
std::string to_text(const std::map<std::string, Metrics::Sum>& sums);
/// The reverse. Throws FormatError.
std::map<std::string, Metrics::Sum> sums_from_text(const std::string& text);

}  // namespace lockstep::train
