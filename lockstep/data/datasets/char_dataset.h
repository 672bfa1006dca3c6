// Text as windows of characters, each with the characters that come next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "lockstep/data/collate.h"

namespace lockstep::data {

struct CharOptions {
  std::size_t block_size = 128;  ///< characters in a window, at least 1
  std::size_t stride = 0;        ///< from one window's beginning to the next; 0: block_size, so that none overlap
};

/// Windows of an encoded text: window i begins at i * stride. A language model reads `data` and predicts `target`.
///   const auto text = read_corpus("shakespeare.txt");
///   const auto vocabulary = Vocabulary::of(text);
///   auto [train, validation] = CharDataset(vocabulary.encode(text), {.block_size = 128}).split(0.9);
class CharDataset {
 public:
  /// Throws UsageError for a block size of 0 and for less text than one window and its target (block_size + 1).
  CharDataset(std::vector<std::int32_t> ids, const CharOptions& options);

  /// The first `fraction` of the text and the rest, which share no character. Throws UsageError unless 0 < fraction < 1
  /// and both hold at least one window.
  std::pair<CharDataset, CharDataset> split(double fraction) const;

  /// data: int64 [block_size]; target: int64 [block_size], the same one character later. CPU.
  Example get(std::size_t index) const;
  /// The same with the dimension [indices] in front.
  Example get_batch(const std::vector<std::size_t>& indices) const;
  /// Windows.
  std::size_t size() const { return (num_ids_ - options_.block_size - 1) / options_.stride + 1; }
  std::size_t num_characters() const { return num_ids_; }

 private:
  CharDataset(std::shared_ptr<const std::vector<std::int32_t>> ids, std::size_t first, std::size_t num_ids,
              const CharOptions& options);

  std::shared_ptr<const std::vector<std::int32_t>> ids_;  // copies and parts share the text
  std::size_t first_;
  std::size_t num_ids_;
  CharOptions options_;
};

}  // namespace lockstep::data
