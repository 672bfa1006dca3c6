# Finds the packages that Lockstep needs.
#
# LOCKSTEP_DEPS names a folder that `scripts/setup.sh --portable` made, for machines where nothing can be installed. Its
# packages are used instead of the machine's; it has the layout of Debian's packages. The source distribution contains
# one, third_party. Where pip builds in a clone and packages are missing, one is downloaded into the build folder.
set(deps "")
if(EXISTS "${PROJECT_SOURCE_DIR}/third_party/usr/lib/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu")
  set(deps "${PROJECT_SOURCE_DIR}/third_party")
endif()
set(LOCKSTEP_DEPS "${deps}" CACHE PATH "folder made by scripts/setup.sh --portable, instead of installed packages")

macro(lockstep_use_deps folder)
  get_filename_component(deps "${folder}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
  if(NOT EXISTS "${deps}/lockstep.stamp")
    message(FATAL_ERROR "LOCKSTEP_DEPS=${folder} was not made by scripts/setup.sh --portable")
  endif()
  file(GLOB deps_libraries RELATIVE "${deps}/usr/lib" "${deps}/usr/lib/*-linux-gnu")
  set(CMAKE_LIBRARY_ARCHITECTURE "${deps_libraries}")  # find_library() and find_package() search lib/ARCHITECTURE
  list(PREPEND CMAKE_PREFIX_PATH "${deps}/usr")
  include_directories(SYSTEM "${deps}/usr/include")  # compilers search /usr/include by themselves, but not this
endmacro()

# Sets missing to the packages that are not there, separated by commas.
macro(lockstep_find_packages)
  find_package(ZLIB QUIET)
  find_package(nlohmann_json 3.11 QUIET)
  find_path(XXHASH_INCLUDE_DIR xxhash.h)  # used as a header-only library
  find_path(LOCKSTEP_CLI11_INCLUDE CLI/CLI.hpp)
  find_path(LOCKSTEP_SODIUM_INCLUDE sodium.h)
  set(missing "")
  foreach(package "ZLIB_FOUND=zlib" "nlohmann_json_FOUND=nlohmann-json 3.11" "XXHASH_INCLUDE_DIR=xxHash"
                  "LOCKSTEP_CLI11_INCLUDE=CLI11" "LOCKSTEP_SODIUM_INCLUDE=libsodium")
    string(REGEX MATCH "^(.*)=(.*)$" both "${package}")
    set(name "${CMAKE_MATCH_2}")
    if(NOT ${CMAKE_MATCH_1})
      list(APPEND missing "${name}")
    endif()
  endforeach()
  list(JOIN missing ", " missing)
endmacro()

if(LOCKSTEP_DEPS)
  lockstep_use_deps("${LOCKSTEP_DEPS}")
endif()
lockstep_find_packages()
if(missing AND SKBUILD AND NOT LOCKSTEP_DEPS)
  set(downloaded "${CMAKE_BINARY_DIR}/third_party")
  message(STATUS "not installed: ${missing}; downloading them to ${downloaded}")
  execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/scripts/portable_deps.py" "${downloaded}" wheel
                  RESULT_VARIABLE failed)
  if(NOT failed)
    set(LOCKSTEP_DEPS "${downloaded}" CACHE PATH "folder made by scripts/setup.sh --portable" FORCE)
    lockstep_use_deps("${downloaded}")
    lockstep_find_packages()
  endif()
endif()
if(missing)
  message(FATAL_ERROR "not installed: ${missing}. Run scripts/setup.sh; or, without root, scripts/setup.sh --portable "
                      "DIR and cmake -DLOCKSTEP_DEPS=DIR (pip: -C cmake.define.LOCKSTEP_DEPS=DIR); or, without "
                      "a network, copy the folder third_party of the source distribution into this one.")
endif()
