#include "lockstep/base/error.h"
#include "lockstep/data/jpeg/jpeg.h"

namespace lockstep::data::jpeg {

std::string jpeg_unavailable_reason() {
  return "this build cannot read JPEG files: build Lockstep from its sources where libjpeg-turbo is installed "
         "(libjpeg-dev)";
}

void decode_jpeg(std::string_view, const std::string&, const std::function<JpegRegion(int, int)>&, RgbImage&) {
  throw base::UsageError(jpeg_unavailable_reason());
}

}  // namespace lockstep::data::jpeg
