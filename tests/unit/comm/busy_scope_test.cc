#include <gtest/gtest.h>

#include <memory>

#include "lockstep/base/telemetry/rank_page.h"
#include "lockstep/comm/group.h"

namespace lockstep::comm {
namespace {

std::string busy_text(const base::telemetry::RankPage& page) {
  return base::telemetry::text_of(page.busy_with.load().text);
}

TEST(BusyScope, LastStartedIsPublished) {
  const base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
  auto outer = std::make_unique<BusyScope>("evaluate");
  auto inner = std::make_unique<BusyScope>("save");
  EXPECT_EQ(page.busy_depth, 2);
  EXPECT_EQ(busy_text(page), "save");
  inner.reset();
  EXPECT_EQ(page.busy_depth, 1);
  EXPECT_EQ(busy_text(page), "evaluate");
  auto longer = std::make_unique<BusyScope>(std::string(100, 'x'));
  EXPECT_EQ(busy_text(page), std::string(sizeof(base::telemetry::RankPage::BusyText), 'x'));
  outer.reset();  // not in the reverse order of construction
  EXPECT_EQ(busy_text(page), std::string(sizeof(base::telemetry::RankPage::BusyText), 'x'));
  longer.reset();
  EXPECT_EQ(page.busy_depth, 0);
  EXPECT_EQ(busy_text(page), "");
}

}  // namespace
}  // namespace lockstep::comm
