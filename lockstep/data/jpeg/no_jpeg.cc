#include "lockstep/base/error.h"
#include "lockstep/data/jpeg/jpeg.h"

namespace lockstep::data {

std::string jpeg_unavailable_reason() {
  return "this build reads no JPEG files: libjpeg-turbo was missing (the package libjpeg-dev brings it)";
}

void decode_jpeg(std::string_view, const std::string&, const std::function<JpegRegion(int, int)>&, RgbImage&) {
  throw base::UsageError(jpeg_unavailable_reason());
}

}  // namespace lockstep::data
