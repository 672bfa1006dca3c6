// A dataset of character windows of a text, with the next characters as targets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/data/collate.h"

namespace lockstep::data::inline datasets {

struct CharOptions {
  std::size_t block_size = 128;  ///< characters in a window; at least 1
  std::size_t stride = 0;  ///< distance between the beginnings of two windows; 0: block_size, so windows do not overlap
};

/// Windows of an encoded text; window i begins at character i * stride. A language model reads `data` and predicts
/// `target`.
///   const auto text = read_corpus("shakespeare.txt");
///   const auto vocabulary = Vocabulary::from_text(text);
///   auto [train, validation] = CharDataset(vocabulary.encode(text), {.block_size = 128}).split(0.9);
class CharDataset {
 public:
  /// Throws UsageError if block_size is 0 or if the text is shorter than one window and its target (block_size + 1).
  CharDataset(std::vector<std::int32_t> ids, const CharOptions& options);

  /// Returns the first `fraction` of the text and the rest as two datasets that do not overlap. Throws UsageError
  /// unless 0 < fraction < 1 and both parts hold at least one window.
  std::pair<CharDataset, CharDataset> split(double fraction) const;

  /// Returns one window. data: int64 [block_size]; target: int64 [block_size], shifted by one character. Both are on
  /// the CPU.
  Example get(std::size_t index) const;
  /// Returns several windows, stacked along a new first dimension.
  Example get_batch(const std::vector<std::size_t>& indices) const;
  /// The number of windows.
  std::size_t size() const { return (num_ids_ - options_.block_size - 1) / options_.stride + 1; }
  std::size_t num_characters() const { return num_ids_; }

 private:
  CharDataset(std::shared_ptr<const std::vector<std::int32_t>> ids, std::size_t first, std::size_t num_ids,
              const CharOptions& options);

  std::shared_ptr<const std::vector<std::int32_t>> ids_;  // shared by copies and by the parts of split()
  std::size_t first_;
  std::size_t num_ids_;
  CharOptions options_;
};

}  // namespace lockstep::data::inline datasets
