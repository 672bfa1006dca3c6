#include "lockstep/comm/busy_scope.h"

#include <gtest/gtest.h>

#include <memory>

#include "lockstep/base/telemetry/rank_page.h"

namespace lockstep::comm {
namespace {

TEST(BusyScope, LastStartedIsPublished) {
  const base::telemetry::RankPage& page = base::telemetry::RankPage::this_process();
  auto outer = std::make_unique<BusyScope>("evaluate");
  auto inner = std::make_unique<BusyScope>("save");
  EXPECT_EQ(page.busy_depth, 2);
  EXPECT_STREQ(page.busy_with, "save");
  inner.reset();
  EXPECT_EQ(page.busy_depth, 1);
  EXPECT_STREQ(page.busy_with, "evaluate");
  auto longer = std::make_unique<BusyScope>(std::string(100, 'x'));
  EXPECT_EQ(page.busy_with, std::string(sizeof page.busy_with - 1, 'x'));
  outer.reset();  // not in the reverse order of construction
  EXPECT_EQ(page.busy_with, std::string(sizeof page.busy_with - 1, 'x'));
  longer.reset();
  EXPECT_EQ(page.busy_depth, 0);
  EXPECT_STREQ(page.busy_with, "");
}

}  // namespace
}  // namespace lockstep::comm
