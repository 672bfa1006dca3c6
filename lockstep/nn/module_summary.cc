#include "lockstep/nn/module_summary.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <vector>

namespace lockstep::train {
namespace {

struct Count {
  std::int64_t elements = 0, trained = 0;
  std::uint64_t bytes = 0, gradient_bytes = 0;
};

Count count(const std::vector<at::Tensor>& tensors) {
  Count all;
  std::set<const void*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    all.elements += tensor.numel();
    all.bytes += tensor.nbytes();
    if (!tensor.requires_grad()) continue;
    all.trained += tensor.numel();
    all.gradient_bytes += tensor.nbytes();
  }
  return all;
}

/// 1234567 -> "1,234,567".
std::string grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<std::size_t>(at), ",");
  return digits;
}

std::string size_text(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

/// "torch::nn::Conv2dImpl" -> "Conv2d".
std::string kind_of(const torch::nn::Module& module) {
  std::string kind = module.name();
  kind = kind.substr(kind.rfind(':') + 1);
  return kind.size() > 4 && kind.ends_with("Impl") ? kind.substr(0, kind.size() - 4) : kind;
}

using Line = std::vector<std::string>;

void add_children(const torch::nn::Module& module, int depth, const std::string& indent, std::vector<Line>& lines) {
  if (depth <= 0) return;
  for (const auto& child : module.named_children()) {
    const Count inside = count(child.value()->parameters());
    lines.push_back({indent + child.key(), kind_of(*child.value()), grouped(inside.elements), size_text(inside.bytes)});
    add_children(*child.value(), depth - 1, indent + "  ", lines);
  }
}

}  // namespace

std::string summary(const torch::nn::Module& module, int depth) {
  const Count all = count(module.parameters()), buffers = count(module.buffers());
  std::vector<Line> lines = {{"module", "kind", "parameters", "memory"}};
  add_children(module, depth, "", lines);
  lines.push_back({"all", kind_of(module), grouped(all.elements), size_text(all.bytes)});
  std::size_t widths[4] = {};
  for (const Line& line : lines)
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  std::string text;
  for (const Line& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) {
      const std::string gap(widths[i] - line[i].size(), ' ');
      text += (i == 0 ? "" : "  ") + (i < 2 ? line[i] + gap : gap + line[i]);
    }
    text += '\n';
  }
  return text + grouped(all.trained) + " are trained, with " + size_text(all.gradient_bytes) +
         " of gradients; buffers take " + size_text(buffers.bytes) + "\n";
}

}  // namespace lockstep::train
