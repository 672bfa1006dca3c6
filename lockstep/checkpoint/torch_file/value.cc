#include "lockstep/checkpoint/torch_file/value.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

template <typename T, typename Key>
const Value* find_item(const std::vector<Dict::Item>& items, const Key& key) {
  for (const auto& item : items)
    if (const T* const item_key = item.key.as<T>(); item_key && *item_key == key) return &item.value;
  return nullptr;
}

}  // namespace

const Value* Dict::find(std::string_view key) const { return find_item<std::string>(items, key); }
const Value* Dict::find(std::int64_t key) const { return find_item<std::int64_t>(items, key); }
void Dict::add(Value key, Value value) { items.push_back({std::move(key), std::move(value)}); }

std::string_view kind_of(const Value& value) {
  static constexpr std::string_view kKinds[] = {"None",  "a bool", "an integer",   "a number", "a string",
                                                "bytes", "a list", "a dictionary", "a tensor"};
  static_assert(std::size(kKinds) == std::variant_size_v<decltype(value.any)>, "one name per kind");
  if (const auto* const sequence = value.as<Sequence>(); sequence && sequence->kind != Sequence::Kind::kList)
    return sequence->kind == Sequence::Kind::kTuple ? "a tuple" : "a set";
  if (const auto* const dict = value.as<Dict>(); dict && dict->module) return "a module of C++";
  return kKinds[value.any.index()];
}

}  // namespace lockstep::checkpoint::inline torch_file
