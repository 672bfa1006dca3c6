#include "lockstep/checkpoint/safetensors/safetensors_dtype.h"

#include <algorithm>
#include <array>

namespace lockstep::checkpoint {
namespace {

using c10::ScalarType;

constexpr std::array kDtypes = {
    Dtype{"F64", ScalarType::Double, 8},
    Dtype{"F32", ScalarType::Float, 4},
    Dtype{"F16", ScalarType::Half, 2},
    Dtype{"BF16", ScalarType::BFloat16, 2},
    Dtype{"I64", ScalarType::Long, 8},
    Dtype{"I32", ScalarType::Int, 4},
    Dtype{"I16", ScalarType::Short, 2},
    Dtype{"I8", ScalarType::Char, 1},
    Dtype{"U8", ScalarType::Byte, 1},
    Dtype{"BOOL", ScalarType::Bool, 1},
    Dtype{"U64", ScalarType::UInt64, 8},
    Dtype{"U32", ScalarType::UInt32, 4},
    Dtype{"U16", ScalarType::UInt16, 2},
    Dtype{"F8_E4M3", ScalarType::Float8_e4m3fn, 1},
    Dtype{"F8_E5M2", ScalarType::Float8_e5m2, 1},
    Dtype{"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz, 1},
    Dtype{"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz, 1},
    Dtype{"F8_E8M0", ScalarType::Float8_e8m0fnu, 1},
    Dtype{"C64", ScalarType::ComplexFloat, 8},
};

template <typename Predicate>
const Dtype* find(Predicate is_it) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), is_it);
  return found == kDtypes.end() ? nullptr : &*found;
}

}  // namespace

const Dtype* find_dtype(std::string_view name) {
  return find([&](const Dtype& dtype) { return dtype.name == name; });
}

const Dtype* find_dtype(ScalarType type) {
  return find([&](const Dtype& dtype) { return dtype.type == type; });
}

std::string dtype_names() {
  std::string names;
  for (const Dtype& dtype : kDtypes) names += (names.empty() ? "" : ", ") + std::string(dtype.name);
  return names;
}

}  // namespace lockstep::checkpoint
