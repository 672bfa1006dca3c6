// Fuzzes the reader of rank pages, which the agent and `lockstep status` use. Any program may own such a page and write
// to it while it is read.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/job/health/progress_report.h"
#include "lockstep/launch/protocol/frames.h"

using namespace lockstep;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const base::SharedMemory memory = base::telemetry::create_rank_page();
  base::telemetry::RankPage& page = base::telemetry::rank_page_in(memory);
  // Fill the head of the page, and its first and last operations.
  const std::size_t head = offsetof(base::telemetry::RankPage, flight) + sizeof page.flight.started;
  std::memset(memory.data(), 0, head);
  std::memcpy(memory.data(), data, std::min(size, head));
  page.magic = base::telemetry::RankPage::kMagic;
  if (size > head) {
    const std::size_t more = std::min(size - head, memory.size() - head);
    std::memcpy(memory.data() + head, data + head, more);
    std::memcpy(memory.data() + memory.size() - more, data + head, more);
  }
  if (const auto snapshot = base::telemetry::read_rank_page(page)) {
    job::health::progress_report({*snapshot});
    job::health::culprit_ranks({*snapshot});
    launcher::protocol::decode_snapshot(launcher::protocol::encode_snapshot(*snapshot));
  }
  return 0;
}
