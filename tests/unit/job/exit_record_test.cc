#include "lockstep/job/exit_record.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "lockstep/job/fatal.h"
#include "lockstep/job/local_store.h"

namespace lockstep::job {
namespace {

TEST(ExitRecord, IsParsedAsItWasEncoded) {
  for (const ExitRecord record : {ExitRecord{}, ExitRecord{ExitKind::kCode, 0}, ExitRecord{ExitKind::kCode, 255},
                                  ExitRecord{ExitKind::kSignal, SIGKILL}})
    EXPECT_EQ(parse_exit_record(encode(record)), record) << encode(record);
  EXPECT_EQ(encode({}), "closed");
  EXPECT_EQ(encode({ExitKind::kCode, 7}), "code 7");
  EXPECT_EQ(encode({ExitKind::kSignal, 9}), "signal 9");
}

TEST(ExitRecord, OtherTextIsNoRecord) {
  for (const char* const text : {"", "closed ", "code", "code ", "code x", "code -1", "signal 99999999999", "9"})
    EXPECT_EQ(parse_exit_record(text), std::nullopt) << text;
}

TEST(ExitRecord, IsDescribed) {
  EXPECT_EQ(describe({}), "ended without saying why");
  EXPECT_EQ(describe({ExitKind::kCode, 7}), "exited with code 7");
  EXPECT_EQ(describe({ExitKind::kSignal, SIGKILL}), "killed by SIGKILL");
  EXPECT_EQ(describe({ExitKind::kSignal, 50}), "killed by signal 50");
}

TEST(ExitRecord, IsFoundInTheStore) {
  LocalStore store;
  const base::Deadline deadline = base::Deadline::in(std::chrono::seconds(1));
  EXPECT_EQ(find_exit(store, 1, deadline), std::nullopt);
  store.set(key::exited(1), encode({ExitKind::kCode, 3}), deadline);
  EXPECT_EQ(find_exit(store, 1, deadline), (ExitRecord{ExitKind::kCode, 3}));
  store.set(key::exited(1), "", deadline);  // the rank has connected again
  EXPECT_EQ(find_exit(store, 1, deadline), std::nullopt);
}

}  // namespace
}  // namespace lockstep::job
