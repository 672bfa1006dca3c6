// The IDX format of MNIST: a few numbers, then bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::data {

/// An IDX file of unsigned bytes.
struct IdxArray {
  std::vector<std::int64_t> shape;   ///< 1 to 4 dimensions
  std::vector<std::uint8_t> values;  ///< as many as the shape says, row-major
  std::uint64_t values_offset = 0;   ///< of the first value in the (uncompressed) file
};

/// Reads a plain or a gzip-compressed file. Throws SystemError when it cannot be read, and FormatError "FILE:OFFSET:
/// ..." (in a compressed file the offset after decompression) for a wrong header, a size above 2 GiB, a file that is
/// shorter or longer than its header says, and damaged compression. No more memory is taken than a file of that length
/// can fill.
IdxArray read_idx(const std::string& path);

}  // namespace lockstep::data
