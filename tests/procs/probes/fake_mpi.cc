// Loaded before the MPI library, it lets that say that it is what FAKE_MPI_VERSION says.
#include <cstdio>
#include <cstdlib>

extern "C" __attribute__((visibility("default"))) int MPI_Get_library_version(char* version, int* length) {
  const char* said = std::getenv("FAKE_MPI_VERSION");
  *length = std::snprintf(version, 256, "%s", said ? said : "");
  return 0;
}
