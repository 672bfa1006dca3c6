#include "lockstep/launch/hosts/file_staging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/launch/process/tools.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Cargo cargo(const std::string& name, const std::string& content) { return {name, std::string(32, 'a'), content}; }

Shipment shipment(std::vector<Cargo> all) {
  return Shipment(std::make_shared<const std::vector<Cargo>>(std::move(all)));
}

TEST(Shipment, AFileIsKnownByItsContent) {
  const tests::TempDir folder;
  for (const char* name : {"a", "b b"}) std::ofstream(folder / name) << "content";
  std::ofstream(folder / "c") << "Content";
  const Cargo a = cargo_of(folder / "a"), b = cargo_of(folder / "b b"), c = cargo_of(folder / "c");
  EXPECT_EQ(a.content, "content");
  EXPECT_EQ(a.hash, b.hash);
  EXPECT_NE(a.hash, c.hash);
  EXPECT_EQ(a.hash.size(), 32u);
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(b.name, "program") << "a shell is to read it";
  EXPECT_THAT(tests::message_of<base::UsageError>([] { cargo_of("/nowhere"); }),
              HasSubstr("--ship: \"/nowhere\": No such file"));
  EXPECT_THAT(tests::message_of<base::UsageError>([] { cargo_of("/tmp"); }), HasSubstr("not a file"));
}

TEST(Shipment, WhatIsThereIsNotSent) {
  Shipment one = shipment({cargo("lockstep", "first"), cargo("train", "second")});
  std::string said = "y\ny\nframes";
  one.take(said);
  EXPECT_EQ(said, "frames");
  EXPECT_TRUE(one.complete());
}

TEST(Shipment, WhatIsMissingIsSentOneAfterTheOther) {
  Shipment one = shipment({cargo("lockstep", "first"), cargo("train", "second")});
  EXPECT_EQ(one.wanted(), "");
  std::string said = "n";
  one.take(said);
  EXPECT_EQ(one.wanted(), "");
  said += "\n";
  one.take(said);
  EXPECT_EQ(said, "");
  EXPECT_EQ(one.wanted(), "first");
  one.written(3);
  EXPECT_EQ(one.wanted(), "st");
  one.written(2);
  EXPECT_EQ(one.wanted(), "");
  EXPECT_FALSE(one.complete());
  said = "n\n";
  one.take(said);
  EXPECT_EQ(one.wanted(), "second");
  EXPECT_FALSE(one.complete());
  one.written(6);
  EXPECT_TRUE(one.complete());
}

TEST(Shipment, WhoeverSaysSomethingElseIsRefused) {
  for (const char* text : {"Welcome\n", "n\nn\n", "yes\n"}) {
    Shipment one = shipment({cargo("lockstep", "first"), cargo("train", "second")});
    std::string said = text;
    EXPECT_THROW(one.take(said), base::Error) << text;
  }
}

/// What takes the program there, with an agent that is a script.
ToolSaid ship(const std::string& cache, const Cargo& one, const std::string& bytes) {
  return run_tool({.path = "/bin/sh",
                   .words = {"sh", "-c", shipping_script({one}, {"agent"})},
                   .environment = {"PATH=/usr/bin:/bin", "XDG_CACHE_HOME=" + cache},
                   .directory = {},
                   .input = bytes});
}

TEST(Shipment, WhatArrivedInPartIsNotInPlace) {
  const tests::TempDir folder;
  const std::string cache = folder / "cache", program = "#!/bin/sh\necho $0 $*\n";
  const Cargo one = {.name = "program", .hash = "0123", .content = program};
  EXPECT_EQ(ship(cache, one, program.substr(0, 20)).code, 125);
  const ToolSaid whole = ship(cache, one, program);
  EXPECT_EQ(whole.out, "n\n" + cache + "/lockstep/0123/program agent\n") << whole.err;
  EXPECT_EQ(ship(cache, one, "").out, "y\n" + cache + "/lockstep/0123/program agent\n");
}

TEST(Shipment, TheScriptHasNoQuoteThatEndsIt) {
  const std::string script = shipping_script({cargo("lockstep", "12345"), cargo("train", "")}, {"agent", "--guarded"});
  EXPECT_THAT(script, Not(HasSubstr("'")));
  EXPECT_THAT(script, HasSubstr("put " + std::string(32, 'a') + " lockstep 5; "));
  EXPECT_THAT(script, HasSubstr("/lockstep\" agent --guarded --shipped \"$c/"));
}

}  // namespace
}  // namespace lockstep::launcher
