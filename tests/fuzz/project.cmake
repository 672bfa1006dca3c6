# Builds one program per fuzzer, with sanitizers and coverage, from the modules without torch and from the sources of
# other modules that read files.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_BUILD_TYPE RelWithDebInfo)
get_filename_component(root "${CMAKE_CURRENT_SOURCE_DIR}/../.." ABSOLUTE)
list(APPEND CMAKE_MODULE_PATH "${root}/cmake")
find_package(Threads REQUIRED)
find_package(ZLIB REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
include(LockstepSodium)
include(LockstepJpeg)
add_compile_options(
  -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
add_link_options(-fsanitize=address,undefined)

file(
  GLOB_RECURSE sources CONFIGURE_DEPENDS
  "${root}/lockstep/base/*.cc" "${root}/lockstep/job/*.cc")
list(FILTER sources EXCLUDE REGEX "/base/simd/")  # clang 14 lacks a name of a CPU feature
# The sources of launch/, checkpoint/ and data/ that parse input, and their dependencies. All of launch/ would take 1.5
# minutes more.
foreach(
  name
  launch/cli/command_line launch/cli/horovodrun launch/cli/host_list launch/cli/interface_filter
  launch/cli/option_table
  launch/doctor/doctor_messages launch/hosts/remote_command launch/plan/host_info launch/plan/job_plan
  launch/process/environment launch/process/program launch/process/spawn launch/protocol/frames
  checkpoint/files/embedded_hash checkpoint/files/input_file checkpoint/manifest
  checkpoint/safetensors/safetensors_header
  checkpoint/strict_json checkpoint/torch_file/pickle
  checkpoint/torch_file/torch_dtype checkpoint/torch_file/unpickler
  checkpoint/torch_file/zip_reader
  data/datasets/idx data/datasets/vocabulary)
  list(APPEND sources "${root}/lockstep/${name}.cc")
endforeach()
add_library(modules STATIC ${sources} "${root}/lockstep/data/jpeg/${LOCKSTEP_JPEG_SOURCES}")
set_target_properties(modules PROPERTIES UNITY_BUILD "${LOCKSTEP_UNITY}" UNITY_BUILD_BATCH_SIZE 10)
target_include_directories(modules PUBLIC "${root}" SYSTEM PUBLIC "${TORCH_INCLUDE}")
target_compile_definitions(modules PUBLIC LOCKSTEP_VERSION="${VERSION}")
target_link_libraries(
  modules PUBLIC Threads::Threads ZLIB::ZLIB ${LOCKSTEP_JPEG_LINK} nlohmann_json::nlohmann_json lockstep::sodium)

file(GLOB fuzzers CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*_fuzz.cc")
foreach(source IN LISTS fuzzers)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE modules)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
endforeach()
