// Exchanges every dtype in every memory layout with Python's torch in both directions, as .pt and, if safetensors has
// the dtype, as safetensors. Each combination has a name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "lockstep/base/error.h"
#include "lockstep/checkpoint/safetensors/safetensors.h"
#include "lockstep/checkpoint/safetensors/safetensors_header.h"
#include "lockstep/checkpoint/torch_file/torch_file.h"
#include "tests/support/temp_dir.h"

namespace lockstep::checkpoint {
namespace {

using testing::HasSubstr;
using tests::message_of;

const std::pair<const char*, at::ScalarType> kDtypes[] = {{"float64", at::kDouble},
                                                          {"float32", at::kFloat},
                                                          {"float16", at::kHalf},
                                                          {"bfloat16", at::kBFloat16},
                                                          {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                                          {"float8_e5m2", at::kFloat8_e5m2},
                                                          {"float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
                                                          {"float8_e5m2fnuz", at::kFloat8_e5m2fnuz},
                                                          {"float8_e8m0fnu", at::kFloat8_e8m0fnu},
                                                          {"int64", at::kLong},
                                                          {"int32", at::kInt},
                                                          {"int16", at::kShort},
                                                          {"int8", at::kChar},
                                                          {"uint8", at::kByte},
                                                          {"uint16", at::kUInt16},
                                                          {"uint32", at::kUInt32},
                                                          {"uint64", at::kUInt64},
                                                          {"bool", at::kBool},
                                                          {"complex128", at::kComplexDouble},
                                                          {"complex64", at::kComplexFloat},
                                                          {"complex32", at::kComplexHalf}};
// Layouts that both formats have. "shared" consists of two tensors, "shared" and "shared too".
constexpr const char* kLayouts[] = {"whole", "scalar",   "empty",  "slice",     "transposed",
                                    "gaps",  "expanded", "shared", "shared too"};

// The common part of the Python scripts. It makes and compares values as integers, because not all dtypes have
// arithmetic. The C++ code below makes the same values.
constexpr const char* kCommon = R"(
import sys, torch
folder, names = sys.argv[1], sys.argv[2].split()
def integers(size):
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
def numbers(name):
    dtype = getattr(torch, name)
    if name == 'complex128':
        return torch.view_as_complex(((torch.arange(48) * 37 + 11) % 100).view(torch.float64).view(24, 2))
    size = torch.empty(0, dtype=dtype).element_size()
    return ((torch.arange(24) * 37 + 11) % (2 if name == 'bool' else 100)).to(integers(size)).view(dtype)
def raw(t):
    t = torch.view_as_real(t) if t.dtype == torch.complex128 else t
    return t.view(integers(t.element_size())).contiguous()
def forms(name):
    new, pair = lambda: numbers(name), numbers(name)
    return {'whole': new().view(4, 6), 'scalar': new()[5], 'empty': new()[:0].view(0, 4), 'slice': new()[3:9],
            'transposed': new().view(4, 6).t(), 'gaps': new()[::5], 'expanded': new()[7:8].expand(5),
            'shared': pair[:10], 'shared too': pair[5:15]}
def compare(got, want, strides):
    if got.dtype != want.dtype or got.shape != want.shape:
        return f'{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}'
    if strides and got.stride() != want.stride():
        return f'strides {got.stride()}, not {want.stride()}'
    return 'ok' if raw(got).flatten().tolist() == raw(want).flatten().tolist() else 'other values'
)";

constexpr const char* kMatrixWriter = R"(
from safetensors.torch import save_file
for name in names:
    torch.save(forms(name), f'{folder}/python.{name}.pt')
    if name in sys.argv[3].split():
        tensors = {k: raw(t).clone().view(t.dtype) for k, t in forms(name).items()}
        save_file(tensors, f'{folder}/python.{name}.safetensors')
)";

constexpr const char* kMatrixReader = R"(
from safetensors.torch import load_file
def check(kind, name, load, strides):
    got = load(f'{folder}/ours.{name}.{kind}')
    for form, want in forms(name).items():
        print(f'{kind} {name} {form}: {compare(got[form], want, strides and form != "gaps")}')
    if strides:
        apart = got['shared too'].data_ptr() - got['shared'].data_ptr()
        print(f'{kind} {name} shared memory: {"ok" if apart == 5 * got["shared"].element_size() else apart}')
for name in names:
    check('pt', name, lambda path: torch.load(path, weights_only=True), True)
    if name in sys.argv[3].split():
        check('safetensors', name, load_file, False)
)";

std::string matrix_python() { return LOCKSTEP_TEST_PYTHON; }

at::Tensor as_integers(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kComplexDouble) return as_integers(torch::view_as_real(tensor));
  const auto size = tensor.element_size();
  return tensor.view(size == 1 ? at::kByte : size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong).contiguous();
}

at::Tensor numbers(at::ScalarType type) {
  if (type == at::kComplexDouble)
    return torch::view_as_complex((torch::arange(48) * 37 + 11).remainder(100).view(at::kDouble).view({24, 2}));
  const auto size = c10::elementSize(type);
  return (torch::arange(24) * 37 + 11)
      .remainder(type == at::kBool ? 2 : 100)
      .to(size == 1   ? at::kByte
          : size == 2 ? at::kShort
          : size == 4 ? at::kInt
                      : at::kLong)
      .view(type);
}

std::vector<std::pair<std::string, at::Tensor>> forms(at::ScalarType type) {
  const auto numbers_of = [type] { return numbers(type); };
  const at::Tensor pair = numbers(type);
  return {{"whole", numbers_of().view({4, 6})},
          {"scalar", numbers_of()[5]},
          {"empty", numbers_of().slice(0, 0, 0).view({0, 4})},
          {"slice", numbers_of().slice(0, 3, 9)},
          {"transposed", numbers_of().view({4, 6}).t()},
          {"gaps", numbers_of().slice(0, 0, 24, 5)},
          {"expanded", numbers_of().slice(0, 7, 8).expand({5})},
          {"shared", pair.slice(0, 0, 10)},
          {"shared too", pair.slice(0, 5, 15)}};
}

std::string compared(const at::Tensor& got, const at::Tensor& want, bool strides) {
  if (got.scalar_type() != want.scalar_type() || got.sizes() != want.sizes()) return "another dtype or shape";
  if (strides && got.strides() != want.strides()) return "other strides";
  return as_integers(got).equal(as_integers(want)) ? "ok" : "other values";
}

// The result of each combination, by name.
using Results = std::map<std::string, std::string>;

void write_files(const tests::TempDir& folder) {
  for (const auto& [name, type] : kDtypes) {
    Dict dict;
    TensorMap map;
    for (const auto& [form, tensor] : forms(type)) {
      dict.add(form, tensor);
      map.emplace(form, tensor);
    }
    save_torch_file(dict, folder / ("ours." + std::string(name) + ".pt"));
    if (find_dtype(type)) save_tensors(map, folder / ("ours." + std::string(name) + ".safetensors"));
  }
}

void read_python_files(const tests::TempDir& folder, Results& results) {
  for (const auto& [name, type] : kDtypes) {
    const std::string pt = "python to ours: pt " + std::string(name) + " ",
                      safetensors = "python to ours: safetensors " + std::string(name) + " ";
    const Value tree = load_torch_file(folder / ("python." + std::string(name) + ".pt"));
    const auto tensor = [&](const std::string& form) { return *tree.as<Dict>()->find(form)->as<at::Tensor>(); };
    for (const auto& [form, want] : forms(type)) results[pt + form] = compared(tensor(form), want, true);
    const auto apart = static_cast<const char*>(tensor("shared too").const_data_ptr()) -
                       static_cast<const char*>(tensor("shared").const_data_ptr());
    results[pt + "shared memory"] =
        apart == 5 * static_cast<std::int64_t>(c10::elementSize(type)) ? "ok" : std::to_string(apart);
    if (!find_dtype(type)) continue;
    const auto loaded = load_tensors(folder / ("python." + std::string(name) + ".safetensors"));
    for (const auto& [form, want] : forms(type)) results[safetensors + form] = compared(loaded.at(form), want, false);
  }
}

std::set<std::string> all_case_names() {
  std::set<std::string> names;
  for (const std::string way : {"python to ours: ", "ours to python: "})
    for (const auto& [name, type] : kDtypes) {
      for (const std::string form : kLayouts) {
        names.insert(way + "pt " + name + " " + form);
        if (find_dtype(type)) names.insert(way + "safetensors " + name + " " + form);
      }
      names.insert(way + "pt " + name + " shared memory");
    }
  return names;
}

TEST(PythonDtypeMatrix, EveryDtypeAndLayoutRoundTrips) {
  if (std::system(("\"" + matrix_python() + "\" -c 'import torch, safetensors' >/dev/null 2>&1").c_str()) != 0)
    GTEST_SKIP() << "SKIPPED: the Python packages torch and safetensors are not in .deps/python";
  const tests::TempDir folder;
  std::string all, in_safetensors;
  for (const auto& [name, type] : kDtypes) {
    all += std::string(name) + " ";
    if (find_dtype(type)) in_safetensors += std::string(name) + " ";
  }
  const auto run = [&](const char* script) {
    const auto path = folder.write("script.py", std::string(kCommon) + script);
    return std::system(("timeout 100 \"" + matrix_python() + "\" " + path + " " + folder.path() + " '" + all + "' '" +
                        in_safetensors + "' >" + (folder / "said"))
                           .c_str());
  };
  ASSERT_EQ(run(kMatrixWriter), 0);
  write_files(folder);
  Results results;
  read_python_files(folder, results);
  EXPECT_EQ(run(kMatrixReader), 0);
  std::istringstream output(tests::read_file(folder / "said"));
  for (std::string line; std::getline(output, line);)
    results["ours to python: " + line.substr(0, line.find(": "))] = line.substr(line.find(": ") + 2);
  for (const auto& name : all_case_names()) EXPECT_EQ(results[name], "ok") << name;
  EXPECT_EQ(results.size(), all_case_names().size());
}

TEST(PythonDtypeMatrix, RejectsUnsupportedTensors) {
  const tests::TempDir folder;
  const auto torch_file_error = [&](const at::Tensor& tensor) {
    return message_of<base::UsageError>([&] { save_torch_file(tensor, folder / "x"); });
  };
  const auto safetensors_error = [&](const at::Tensor& tensor) {
    return message_of<base::UsageError>([&] { save_tensors({{"x", tensor}}, folder / "x"); });
  };
  const auto quantized = at::quantize_per_tensor(torch::ones({2}), 0.5, 0, at::kQInt8);
  EXPECT_THAT(torch_file_error(quantized), HasSubstr("a tensor of dtype QInt8; expected a dense tensor of float64"));
  EXPECT_THAT(safetensors_error(quantized), HasSubstr("tensor \"x\" of dtype QInt8; expected a dense tensor of F64"));
  for (const auto& sparse : {torch::ones({2, 2}).to_sparse(), torch::ones({2, 2}).to_sparse_csr()}) {
    EXPECT_THAT(torch_file_error(sparse), HasSubstr("of dtype Float, which is sparse"));
    EXPECT_THAT(safetensors_error(sparse), HasSubstr("of dtype Float, which is sparse"));
  }
  for (const auto type : {at::kComplexDouble, at::kComplexHalf})
    EXPECT_THAT(safetensors_error(torch::zeros({2}, at::kComplexFloat).to(type)),
                HasSubstr("tensor \"x\" of dtype Complex"));
}

}  // namespace
}  // namespace lockstep::checkpoint
