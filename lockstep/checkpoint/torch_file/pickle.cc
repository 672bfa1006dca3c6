#include "lockstep/checkpoint/torch_file/pickle.h"

#include <algorithm>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/checkpoint/files/limits.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

// The memory of a value of the tree, without its contents.
constexpr std::uint64_t kNodeBytes = 64;

struct TreeSize {
  std::uint64_t num_bytes = 0;  // including its contents, counted once per occurrence
  std::size_t depth = 0;
};

class PickleValidator {
 public:
  PickleValidator(const Pickle& pickle, const std::string& file, std::uint64_t begin)
      : pickle_(pickle), file_(file), begin_(begin), sizes_(pickle.values.size()) {}

  // Measures each value once. A container that contains itself is visited again until the depth exceeds the limit.
  TreeSize measure(Pickle::Index index, std::size_t depth) {
    if (depth > files::kMaxTreeDepth)
      throw_format_error(index, "values are nested deeper than the limit of 64 levels, or contain themselves");
    if (sizes_[index].depth > 0) return sizes_[index];
    const Pickle::Value& value = pickle_.values[index];
    TreeSize size{kNodeBytes, 1};
    if (const auto* const text = std::get_if<std::string_view>(&value)) size.num_bytes += text->size();
    if (const auto* const bytes = std::get_if<Pickle::ByteString>(&value)) size.num_bytes += bytes->bytes.size();
    if (const auto* const tensor = std::get_if<Pickle::TensorRef>(&value))
      size.num_bytes += sizeof(Pickle::Tensor) + 16 * pickle_.tensors[tensor->index].sizes.size();
    if (const auto* const container = std::get_if<Pickle::Container>(&value)) {
      for (const Pickle::Index item : container->items) {
        const TreeSize inside = measure(item, depth + 1);
        size = {size.num_bytes + inside.num_bytes, std::max(size.depth, inside.depth + 1)};
        if (size.num_bytes > files::kMaxTreeBytes || size.depth > files::kMaxTreeDepth)
          throw_format_error(index, "with shared values expanded, the values take more than 128 MiB or 64 levels");
      }
      check_keys(index, *container);
    }
    if (value.index() >= 8) throw_format_error(index, "found a function, a storage or a dtype; expected a value");
    return sizes_[index] = size;
  }

 private:
  [[noreturn]] void throw_format_error(Pickle::Index index, const std::string& reason) const {
    throw base::FormatError(file_ + ":" + std::to_string(begin_ + pickle_.offsets[index]) + ": " + reason);
  }

  void check_keys(Pickle::Index index, const Pickle::Container& container) const {
    using Kind = Pickle::Kind;
    if (container.kind != Kind::kDict && container.kind != Kind::kOrderedDict && container.kind != Kind::kModule)
      return;
    std::set<std::string_view> names;
    std::set<std::int64_t> numbers;
    for (std::size_t i = 0; i < container.items.size(); i += 2) {
      const Pickle::Value& key = pickle_.values[container.items[i]];
      const auto* const name = std::get_if<std::string_view>(&key);
      const auto* const number = std::get_if<std::int64_t>(&key);
      if (name && !names.insert(*name).second) throw_format_error(index, "duplicate key " + base::quoted(*name, 80));
      if (number && !numbers.insert(*number).second)
        throw_format_error(index, "duplicate key " + std::to_string(*number));
      const auto* const inside = std::get_if<Pickle::Container>(&key);
      if ((inside && inside->kind != Pickle::Kind::kTuple) || std::holds_alternative<Pickle::TensorRef>(key))
        throw_format_error(index, "a key is a list, a set, a dictionary or a tensor");
    }
  }

  const Pickle& pickle_;
  const std::string& file_;
  const std::uint64_t begin_;
  std::vector<TreeSize> sizes_;
};

static_assert(std::is_same_v<std::variant_alternative_t<7, Pickle::Value>, Pickle::TensorRef>,
              "the last of the values that a tree may hold");

}  // namespace

void validate_pickle(const Pickle& pickle, const std::string& file, std::uint64_t begin) {
  PickleValidator(pickle, file, begin).measure(pickle.root, 1);
}

}  // namespace lockstep::checkpoint::inline torch_file
