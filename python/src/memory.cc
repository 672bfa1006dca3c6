// Memory that processes share until they write to it, and copies of it for children.
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cerrno>

#include "lockstep/comm/arena/fork_copies.h"
#include "python/src/bindings.h"

namespace lockstep::python {

void bind_memory(py::module_& module) {
  module.def(
      "map_private",
      [](int file, std::int64_t offset, std::int64_t num_bytes) {
        void* const at =
            ::mmap(nullptr, static_cast<std::size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE, file, offset);
        if (at == MAP_FAILED) throw base::SystemError("mmap", errno);
        return at::from_blob(
            at, {num_bytes},
            [num_bytes](void* mapped) {
              // Fails only for an invalid range.
              static_cast<void>(::munmap(mapped, static_cast<std::size_t>(num_bytes)));
            },
            at::kByte);
      },
      "map_private(file, offset, num_bytes): maps a part of a file as a tensor, uint8. A write copies the page, which "
      "others do not see. `offset` is a multiple of the page size, and `num_bytes` more than 0.");
  module.def(
      "with_shared_fork_copies",
      [](const py::function& run) {
        const comm::arena::SharedForkCopies scope;
        run();
      },
      "Calls run(), whose children made by fork() share one copy of the tensors.");
}

}  // namespace lockstep::python
