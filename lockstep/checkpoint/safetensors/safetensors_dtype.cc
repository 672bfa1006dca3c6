#include "lockstep/checkpoint/safetensors/safetensors_dtype.h"

#include <algorithm>
#include <array>

namespace lockstep::checkpoint::inline safetensors {
namespace {

using c10::ScalarType;

constexpr std::array kDtypes = {
    SafetensorsDtype{"F64", ScalarType::Double, 8},
    SafetensorsDtype{"F32", ScalarType::Float, 4},
    SafetensorsDtype{"F16", ScalarType::Half, 2},
    SafetensorsDtype{"BF16", ScalarType::BFloat16, 2},
    SafetensorsDtype{"I64", ScalarType::Long, 8},
    SafetensorsDtype{"I32", ScalarType::Int, 4},
    SafetensorsDtype{"I16", ScalarType::Short, 2},
    SafetensorsDtype{"I8", ScalarType::Char, 1},
    SafetensorsDtype{"U8", ScalarType::Byte, 1},
    SafetensorsDtype{"BOOL", ScalarType::Bool, 1},
    SafetensorsDtype{"U64", ScalarType::UInt64, 8},
    SafetensorsDtype{"U32", ScalarType::UInt32, 4},
    SafetensorsDtype{"U16", ScalarType::UInt16, 2},
    SafetensorsDtype{"F8_E4M3", ScalarType::Float8_e4m3fn, 1},
    SafetensorsDtype{"F8_E5M2", ScalarType::Float8_e5m2, 1},
    SafetensorsDtype{"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz, 1},
    SafetensorsDtype{"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz, 1},
    SafetensorsDtype{"F8_E8M0", ScalarType::Float8_e8m0fnu, 1},
    SafetensorsDtype{"C64", ScalarType::ComplexFloat, 8},
};

template <typename Predicate>
const SafetensorsDtype* find(Predicate is_it) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), is_it);
  return found == kDtypes.end() ? nullptr : &*found;
}

}  // namespace

const SafetensorsDtype* find_dtype(std::string_view name) {
  return find([&](const SafetensorsDtype& dtype) { return dtype.name == name; });
}

const SafetensorsDtype* find_dtype(ScalarType type) {
  return find([&](const SafetensorsDtype& dtype) { return dtype.type == type; });
}

std::string dtype_names() {
  std::string names;
  for (const SafetensorsDtype& dtype : kDtypes) names += (names.empty() ? "" : ", ") + std::string(dtype.name);
  return names;
}

}  // namespace lockstep::checkpoint::inline safetensors
