// A library that replaces the version string of the MPI library with FAKE_MPI_VERSION when it is preloaded.
#include <cstdio>
#include <cstdlib>

extern "C" __attribute__((visibility("default"))) int MPI_Get_library_version(char* version, int* length) {
  const char* text = std::getenv("FAKE_MPI_VERSION");
  *length = std::snprintf(version, 256, "%s", text ? text : "");
  return 0;
}
