#include "lockstep/base/error.h"
#include "lockstep/data/jpeg/jpeg.h"

namespace lockstep::data {

std::string jpeg_missing() {
  return "this build reads no JPEG files: libjpeg-turbo was missing (the package libjpeg-dev brings it)";
}

void decode_jpeg(std::string_view, const std::string&, const std::function<JpegPart(int, int)>&, Pixels&) {
  throw base::UsageError(jpeg_missing());
}

}  // namespace lockstep::data
