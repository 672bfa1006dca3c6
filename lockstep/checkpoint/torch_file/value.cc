#include "lockstep/checkpoint/torch_file/value.h"

namespace lockstep::checkpoint {
namespace {

template <typename T, typename Key>
const Value* found(const std::vector<Dict::Item>& items, const Key& key) {
  for (const auto& item : items)
    if (const T* const here = item.key.as<T>(); here && *here == key) return &item.value;
  return nullptr;
}

}  // namespace

const Value* Dict::find(std::string_view key) const { return found<std::string>(items, key); }
const Value* Dict::find(std::int64_t key) const { return found<std::int64_t>(items, key); }
void Dict::add(Value key, Value value) { items.push_back({std::move(key), std::move(value)}); }

std::string_view kind_of(const Value& value) {
  static constexpr std::string_view kKinds[] = {"None",  "a bool", "an integer",   "a number", "a string",
                                                "bytes", "a list", "a dictionary", "a tensor"};
  if (const auto* const sequence = value.as<Sequence>(); sequence && sequence->kind != Sequence::Kind::kList)
    return sequence->kind == Sequence::Kind::kTuple ? "a tuple" : "a set";
  return kKinds[value.any.index()];
}

}  // namespace lockstep::checkpoint
