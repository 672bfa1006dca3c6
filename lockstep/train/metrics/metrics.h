// Metrics as sums and counts, so that means are exact for any batch sizes and numbers of samples per rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/train/loggers/logger.h"

namespace lockstep::training::inline metrics {

/// Accumulates named values since the last clear(). Used by one thread.
///
/// A mean over ranks is the sum of all sums divided by the sum of all counts, not a mean of means: a rank with fewer
/// samples has less weight, and a rank without samples has none.
class Metrics {
 public:
  /// Adds the mean of `count` samples: a number or a tensor of one element. Does not synchronize with a device: sums()
  /// reads values on it. Does not keep the autograd graph. Throws UsageError for a tensor that does not have one
  /// element, a name that is empty or contains a line break, and a count that is not positive.
  void add(const std::string& name, const at::Tensor& mean, double count = 1);
  void add(const std::string& name, double mean, double count = 1);

  struct Sum {
    double sum = 0, count = 0;
    bool operator==(const Sum&) const = default;
  };
  /// Returns the sums of this rank by name. Synchronizes with the device if tensors on it were added.
  std::map<std::string, Sum> sums() const;
  /// Adds sums from elsewhere, such as a checkpoint.
  void add(const std::map<std::string, Sum>& sums);
  void clear() { entries_.clear(); }
  bool empty() const { return entries_.empty(); }

  /// Returns the names whose values were infinite or NaN when they were added, each once, and clears the list. Values
  /// on a device are not checked.
  std::vector<std::string> take_non_finite_names() { return std::exchange(non_finite_names_, {}); }

 private:
  struct Entry {
    Sum sum;                // of values on the CPU, and the count of all values
    at::Tensor device_sum;  // float64 sum of the tensors on a device; undefined when there are none
  };
  Entry& find_or_add(const std::string& name, double count);
  std::map<std::string, Entry> entries_;
  std::vector<std::string> non_finite_names_;
};

/// Returns means over all ranks, in the order of names. Collective, in one operation; ranks may have different names.
/// Bit-equal on all ranks: sums are added in rank order.
NamedValues mean_over_ranks(const Metrics& metrics, const comm::Group& group);

/// Serializes sums as one line "SUM COUNT NAME" per name, with hexadecimal numbers so that they round-trip exactly.
std::string to_text(const std::map<std::string, Metrics::Sum>& sums);
/// Parses that text. Throws FormatError.
std::map<std::string, Metrics::Sum> sums_from_text(const std::string& text);

}  // namespace lockstep::training::inline metrics
