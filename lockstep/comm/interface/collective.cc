#include "lockstep/comm/interface/collective.h"

#include <array>
#include <utility>

#include "lockstep/base/parse.h"

namespace lockstep::comm::inline interface {
namespace {

constexpr std::array<std::string_view, 11> kKindNames = {"all_reduce",     "reduce", "broadcast", "all_gather",
                                                         "reduce_scatter", "gather", "scatter",   "all_to_all",
                                                         "send",           "recv",   "barrier"};
constexpr std::array<std::string_view, 5> kOpNames = {"sum", "mean", "min", "max", "product"};

static_assert(kKindNames.size() == static_cast<std::size_t>(CollectiveKind::kBarrier) + 1, "one name per kind");
static_assert(kOpNames.size() == static_cast<std::size_t>(ReduceOp::kProduct) + 1, "one name per operator");

constexpr std::pair<at::ScalarType, std::string_view> kDtypeNames[] = {
    {at::kDouble, "float64"},    {at::kFloat, "float32"}, {at::kHalf, "float16"},
    {at::kBFloat16, "bfloat16"}, {at::kLong, "int64"},    {at::kInt, "int32"},
    {at::kChar, "int8"},         {at::kByte, "uint8"},    {at::kBool, "bool"}};

}  // namespace

std::string_view name(CollectiveKind kind) { return kKindNames.at(static_cast<std::size_t>(kind)); }
std::string_view name(ReduceOp op) { return kOpNames.at(static_cast<std::size_t>(op)); }

std::string_view name(at::ScalarType dtype) {
  for (const auto& [known, text] : kDtypeNames)
    if (known == dtype) return text;
  return "?";
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  return std::string(name(tensor.scalar_type())) + "[" + base::joined(tensor.sizes(), ",") + "]";
}

std::string label(const Collective& op) {
  std::string text(name(op.kind));
  if (!op.name.empty()) text += "(" + op.name + ")";
  return text + "#" + std::to_string(op.seq);
}

}  // namespace lockstep::comm::inline interface
