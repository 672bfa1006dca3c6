#include "lockstep/data/datasets/vocabulary.h"

#include <algorithm>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/utf8.h"

namespace lockstep::data::inline datasets {
namespace {

std::size_t symbol_length(std::string_view text) { return std::max<std::size_t>(1, base::utf8_length(text)); }

}  // namespace

Vocabulary Vocabulary::from_text(std::string_view text) {
  std::array<bool, 256> seen{};
  std::set<std::string, std::less<>> symbols;
  while (!text.empty()) {
    const std::size_t length = symbol_length(text);
    const auto symbol = text.substr(0, length);
    text.remove_prefix(length);
    auto& is_known = seen[static_cast<unsigned char>(symbol[0])];
    if (length == 1 && is_known) continue;
    if (length == 1) is_known = true;
    if (!symbols.contains(symbol)) symbols.emplace(symbol);
  }
  return Vocabulary(std::vector<std::string>(symbols.begin(), symbols.end()));
}

Vocabulary Vocabulary::bytes() {
  std::vector<std::string> symbols;
  for (int byte = 0; byte < 256; ++byte) symbols.emplace_back(1, static_cast<char>(byte));
  return Vocabulary(std::move(symbols));
}

Vocabulary::Vocabulary(std::vector<std::string> symbols) : symbols_(std::move(symbols)) {
  single_byte_ids_.fill(-1);
  for (std::size_t i = 0; i < symbols_.size(); ++i) {
    const std::string& symbol = symbols_[i];
    if (symbol.empty() || symbol.size() != symbol_length(symbol))
      throw base::UsageError("symbol " + std::to_string(i) + " of the vocabulary is " + base::quoted(symbol, 80) +
                             "; expected one UTF-8 character or one byte");
    const auto id = static_cast<std::int32_t>(i);
    auto& slot = symbol.size() == 1 ? single_byte_ids_[static_cast<unsigned char>(symbol[0])]
                                    : multi_byte_ids_.try_emplace(symbol, -1).first->second;
    if (slot != -1)
      throw base::UsageError("symbol " + base::quoted(symbol) + " is in the vocabulary twice, at " +
                             std::to_string(slot) + " and " + std::to_string(id));
    slot = id;
  }
  is_byte_level_ = multi_byte_ids_.empty() && symbols_.size() == 256;
}

std::vector<std::int32_t> Vocabulary::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  ids.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto rest = text.substr(at);
    const auto symbol = rest.substr(0, is_byte_level_ ? 1 : symbol_length(rest));
    std::int32_t id = -1;
    if (symbol.size() == 1)
      id = single_byte_ids_[static_cast<unsigned char>(symbol[0])];
    else if (const auto found = multi_byte_ids_.find(symbol); found != multi_byte_ids_.end())
      id = found->second;
    if (id < 0)
      throw base::UsageError("the character " + base::quoted(symbol) + " at byte " + std::to_string(at) +
                             " is not in the vocabulary of " + std::to_string(size()) + " symbols");
    ids.push_back(id);
    at += symbol.size();
  }
  return ids;
}

std::string Vocabulary::decode(const std::vector<std::int64_t>& ids) const {
  std::string text;
  for (const auto id : ids) {
    if (id < 0 || id >= static_cast<std::int64_t>(size()))
      throw base::UsageError("Vocabulary::decode: symbol number " + std::to_string(id) + "; expected 0 to " +
                             std::to_string(size() - 1));
    text += symbols_[static_cast<std::size_t>(id)];
  }
  return text;
}

}  // namespace lockstep::data::inline datasets
