#include "lockstep/base/env.h"

#include <gtest/gtest.h>

#include <set>

namespace lockstep::base {
namespace {

TEST(Env, EachVariableHasItsOwnField) {
  std::set<std::string> asked;
  const Env env([&](const char* name) -> Env::Value {
    EXPECT_TRUE(asked.insert(name).second) << name << " is looked up twice";
    return std::string("value of ") + name;
  });
  EXPECT_EQ(env.lockstep_rank, "value of LOCKSTEP_RANK");
  EXPECT_EQ(env.lockstep_store, "value of LOCKSTEP_STORE");
  EXPECT_EQ(env.rank, "value of RANK");
  EXPECT_EQ(env.master_port, "value of MASTER_PORT");
  EXPECT_EQ(env.torchelastic_use_agent_store, "value of TORCHELASTIC_USE_AGENT_STORE");
  EXPECT_FALSE(env.lockstep_transport) << "it is not valid";
}

TEST(Env, EmptyValueCountsAsUnset) {
  const Env env = Env([](const char*) -> Env::Value { return ""; });
  EXPECT_FALSE(env.rank);
  EXPECT_FALSE(env.lockstep_rank);
  EXPECT_FALSE(Env().world_size);
}

}  // namespace
}  // namespace lockstep::base
