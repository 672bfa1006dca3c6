#include "lockstep/base/error.h"
#include "lockstep/data/jpeg/jpeg.h"

namespace lockstep::data::jpeg {

std::string jpeg_unavailable_reason() {
  return "this build cannot read JPEG files: libjpeg-turbo was not found. Install libjpeg-dev and build again.";
}

void decode_jpeg(std::string_view, const std::string&, const std::function<JpegRegion(int, int)>&, RgbImage&) {
  throw base::UsageError(jpeg_unavailable_reason());
}

}  // namespace lockstep::data::jpeg
