#include "lockstep/nn/module_summary.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <vector>

namespace lockstep::nn {
namespace {

struct ParameterCounts {
  std::int64_t elements = 0, trainable = 0;
  std::uint64_t bytes = 0, gradient_bytes = 0;
};

ParameterCounts count_parameters(const std::vector<at::Tensor>& tensors) {
  ParameterCounts all;
  std::set<const void*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    all.elements += tensor.numel();
    all.bytes += tensor.nbytes();
    if (!tensor.requires_grad()) continue;
    all.trainable += tensor.numel();
    all.gradient_bytes += tensor.nbytes();
  }
  return all;
}

/// 1234567 -> "1,234,567".
std::string with_thousands_separators(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<std::size_t>(at), 1, ',');
  return digits;
}

std::string format_bytes(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

/// "torch::nn::Conv2dImpl" -> "Conv2d".
std::string module_type(const torch::nn::Module& module) {
  std::string kind = module.name();
  kind = kind.substr(kind.rfind(':') + 1);
  return kind.size() > 4 && kind.ends_with("Impl") ? kind.substr(0, kind.size() - 4) : kind;
}

using TableRow = std::vector<std::string>;

void add_children(const torch::nn::Module& module, int depth, const std::string& indent, std::vector<TableRow>& rows) {
  if (depth <= 0) return;
  for (const auto& child : module.named_children()) {
    const ParameterCounts inside = count_parameters(child.value()->parameters());
    rows.push_back({indent + child.key(), module_type(*child.value()), with_thousands_separators(inside.elements),
                    format_bytes(inside.bytes)});
    add_children(*child.value(), depth - 1, indent + "  ", rows);
  }
}

}  // namespace

std::string module_summary(nn::ConstModuleRef module, int depth) {
  const ParameterCounts all = count_parameters(module->parameters()), buffers = count_parameters(module->buffers());
  std::vector<TableRow> rows = {{"module", "kind", "parameters", "memory"}};
  add_children(*module, depth, "", rows);
  rows.push_back({"all", module_type(*module), with_thousands_separators(all.elements), format_bytes(all.bytes)});
  std::size_t widths[4] = {};
  for (const TableRow& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const TableRow& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - row[i].size(), ' ');
      text += (i == 0 ? "" : "  ") + (i < 2 ? row[i] + gap : gap + row[i]);
    }
    text += '\n';
  }
  return text + with_thousands_separators(all.trainable) + " parameters are trainable, with " +
         format_bytes(all.gradient_bytes) + " of gradients; buffers take " + format_bytes(buffers.bytes) + "\n";
}

}  // namespace lockstep::nn
