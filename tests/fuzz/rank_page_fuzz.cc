// The page of a rank, which its agent and `lockstep status` read: it may be any program's, and written to meanwhile.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/progress_report.h"
#include "lockstep/launch/protocol/frames.h"

using namespace lockstep;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const base::SharedMemory memory = base::create_rank_page();
  base::RankPage& page = base::rank_page_in(memory);
  // The head, and the first and last of the operations.
  const std::size_t head = offsetof(base::RankPage, flight) + sizeof page.flight.started;
  std::memset(memory.data(), 0, head);
  std::memcpy(memory.data(), data, std::min(size, head));
  std::memcpy(page.magic, base::RankPage::kMagic, sizeof page.magic);
  if (size > head) {
    const std::size_t more = std::min(size - head, memory.size() - head);
    std::memcpy(memory.data() + head, data + head, more);
    std::memcpy(memory.data() + memory.size() - more, data + head, more);
  }
  if (const auto seen = base::read_rank_page(memory)) {
    job::progress_report({*seen});
    job::culprit_ranks({*seen});
    launcher::decode_snapshot(launcher::encode_snapshot(*seen));
  }
  return 0;
}
