#include "lockstep/checkpoint/torch_file/torch_dtype.h"

#include <algorithm>
#include <array>

#include "lockstep/base/parse.h"

namespace lockstep::checkpoint::inline torch_file {
namespace {

using c10::ScalarType;

constexpr std::array kDtypes = {
    TorchDtype{"float64", "DoubleStorage", ScalarType::Double, 8},
    TorchDtype{"float32", "FloatStorage", ScalarType::Float, 4},
    TorchDtype{"float16", "HalfStorage", ScalarType::Half, 2},
    TorchDtype{"bfloat16", "BFloat16Storage", ScalarType::BFloat16, 2},
    TorchDtype{"int64", "LongStorage", ScalarType::Long, 8},
    TorchDtype{"int32", "IntStorage", ScalarType::Int, 4},
    TorchDtype{"int16", "ShortStorage", ScalarType::Short, 2},
    TorchDtype{"int8", "CharStorage", ScalarType::Char, 1},
    TorchDtype{"uint8", "ByteStorage", ScalarType::Byte, 1},
    TorchDtype{"bool", "BoolStorage", ScalarType::Bool, 1},
    TorchDtype{"complex128", "ComplexDoubleStorage", ScalarType::ComplexDouble, 16},
    TorchDtype{"complex64", "ComplexFloatStorage", ScalarType::ComplexFloat, 8},
    TorchDtype{"complex32", "", ScalarType::ComplexHalf, 4},
    TorchDtype{"uint16", "", ScalarType::UInt16, 2},
    TorchDtype{"uint32", "", ScalarType::UInt32, 4},
    TorchDtype{"uint64", "", ScalarType::UInt64, 8},
    TorchDtype{"float8_e4m3fn", "", ScalarType::Float8_e4m3fn, 1},
    TorchDtype{"float8_e5m2", "", ScalarType::Float8_e5m2, 1},
    TorchDtype{"float8_e4m3fnuz", "", ScalarType::Float8_e4m3fnuz, 1},
    TorchDtype{"float8_e5m2fnuz", "", ScalarType::Float8_e5m2fnuz, 1},
    TorchDtype{"float8_e8m0fnu", "", ScalarType::Float8_e8m0fnu, 1},
};

template <typename Predicate>
const TorchDtype* find(Predicate is_it) {
  const auto found = std::find_if(kDtypes.begin(), kDtypes.end(), is_it);
  return found == kDtypes.end() ? nullptr : &*found;
}

}  // namespace

const TorchDtype* find_torch_dtype(std::string_view name) {
  return find([&](const TorchDtype& dtype) { return dtype.name == name; });
}

const TorchDtype* find_torch_storage(std::string_view storage) {
  const auto cpp_name = [](ScalarType type) { return std::string(c10::toString(type)) + "Storage"; };
  return find([&](const TorchDtype& dtype) {
    return dtype.storage.empty() ? storage == cpp_name(dtype.type) : storage == dtype.storage;
  });
}

const TorchDtype* find_torch_dtype(ScalarType type) {
  return find([&](const TorchDtype& dtype) { return dtype.type == type; });
}

std::string torch_dtype_names() {
  return base::joined(kDtypes, ", ", [](const TorchDtype& dtype) { return dtype.name; });
}

}  // namespace lockstep::checkpoint::inline torch_file
