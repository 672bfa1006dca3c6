// Exchanges files with Python's safetensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>

#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

constexpr const char* kScript = R"(
import sys
from safetensors import safe_open
from safetensors.torch import load_file, save_file
folder = sys.argv[1]
tensors = load_file(folder + '/from_cpp')
with safe_open(folder + '/from_cpp', 'pt') as f:
    theirs = {k: v for k, v in f.metadata().items() if not k.startswith('lockstep.')}
    assert theirs == {'format': 'pt', 'step': '12'}, f.metadata()
import torch
t = torch.arange(6).view(2, 3) - 2
types = ['float64', 'float32', 'float16', 'bfloat16', 'int64', 'int32', 'int16', 'int8', 'bool']
for name in types:
    want = t.to(getattr(torch, name))
    assert tensors[name].dtype == want.dtype and torch.equal(tensors[name], want), (name, tensors[name])
assert torch.equal(tensors['transposed'], t.t().float()), tensors['transposed']
assert tensors['scalar'].shape == () and tensors['scalar'].item() == 3.5
assert tensors['empty'].shape == (0, 4)
assert set(tensors) == set(types) | {'transposed', 'scalar', 'empty', 'ä'}, set(tensors)
save_file({k: v.contiguous() for k, v in tensors.items()}, folder + '/from_python', metadata={'by': 'python'})
)";

TEST(PythonSafetensors, RoundTripsThroughPython) {
  const std::string python = LOCKSTEP_TEST_PYTHON;
  if (std::system(("\"" + python + "\" -c 'import safetensors' >/dev/null 2>&1").c_str()) != 0)
    GTEST_SKIP() << "SKIPPED: the Python package safetensors is not in .deps/python";
  const tests::TempDir folder;
  const auto values = torch::arange(6).view({2, 3}) - 2;
  TensorMap tensors = {{"transposed", values.t().to(torch::kFloat32)},
                       {"scalar", torch::tensor(3.5)},
                       {"empty", torch::empty({0, 4})},
                       {"\xc3\xa4", torch::ones({1})}};
  const std::pair<const char*, at::ScalarType> types[] = {
      {"float64", torch::kFloat64},   {"float32", torch::kFloat32}, {"float16", torch::kFloat16},
      {"bfloat16", torch::kBFloat16}, {"int64", torch::kInt64},     {"int32", torch::kInt32},
      {"int16", torch::kInt16},       {"int8", torch::kInt8},       {"bool", torch::kBool}};
  for (const auto& [name, type] : types) tensors[name] = values.to(type);
  save_tensors(tensors, folder / "from_cpp", {.metadata = {{"step", "12"}}});
  const auto script = folder.write("script.py", kScript);
  ASSERT_EQ(std::system(("timeout 100 \"" + python + "\" " + script + " " + folder.path()).c_str()), 0);
  const auto loaded = load_tensors(folder / "from_python");
  ASSERT_EQ(loaded.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(loaded.at(name).equal(tensor)) << name;
  EXPECT_EQ(SafetensorsReader(folder / "from_python").metadata().at("by"), "python");
}

}  // namespace
}  // namespace lockstep::checkpoint
