// Reads the IDX format of MNIST: a header with the shape, followed by the values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::data::inline datasets {

/// The contents of an IDX file of unsigned bytes.
struct IdxArray {
  std::vector<std::int64_t> shape;   ///< 1 to 4 dimensions
  std::vector<std::uint8_t> values;  ///< row-major; the product of the shape's dimensions
  std::uint64_t values_offset = 0;   ///< position of the first value in the (uncompressed) file
};

/// Reads a plain or a gzip-compressed file. Throws SystemError if it cannot be read. Throws FormatError "FILE:OFFSET:
/// ..." for a wrong header, a size above 2 GiB, a file that is shorter or longer than its header says, and damaged
/// compressed data; in a compressed file the offset counts decompressed bytes. Allocates no more memory than a file of
/// that length can fill.
IdxArray read_idx(const std::string& path);

}  // namespace lockstep::data::inline datasets
