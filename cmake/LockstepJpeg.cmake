# Finds libjpeg-turbo (BSD-like licences), which reads JPEG images; Debian's and Ubuntu's libjpeg-dev contains it.
# Without it, Lockstep is built without JPEG images. The libjpeg of the IJG does not suffice: it cannot skip rows and
# columns that are not needed.
find_package(JPEG QUIET)
set(LOCKSTEP_JPEG no)
if(JPEG_FOUND)
  file(STRINGS "${JPEG_INCLUDE_DIRS}/jpeglib.h" crops REGEX "jpeg_crop_scanline")
  if(crops)
    set(LOCKSTEP_JPEG yes)
  endif()
endif()
if(LOCKSTEP_JPEG)
  set(LOCKSTEP_JPEG_SOURCES jpeg.cc)
  set(LOCKSTEP_JPEG_LINK JPEG::JPEG)
else()
  set(LOCKSTEP_JPEG_SOURCES no_jpeg.cc)
  set(LOCKSTEP_JPEG_LINK)
  message(STATUS "libjpeg-turbo was not found (package libjpeg-dev): Lockstep is built without reading JPEG images")
endif()
