#include "lockstep/launch/hosts/file_staging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/launch/process/tools.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::hosts {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

StagedFile staged_file(const std::string& name, const std::string& content) {
  return {name, std::string(32, 'a'), content};
}

FileStaging staging(std::vector<StagedFile> all) {
  return FileStaging(std::make_shared<const std::vector<StagedFile>>(std::move(all)));
}

TEST(FileStaging, FilesAreIdentifiedByContent) {
  const tests::TempDir folder;
  for (const char* name : {"a", "b b"}) std::ofstream(folder / name) << "content";
  std::ofstream(folder / "c") << "Content";
  const StagedFile a = read_staged_file(folder / "a"), b = read_staged_file(folder / "b b"),
                   c = read_staged_file(folder / "c");
  EXPECT_EQ(a.content, "content");
  EXPECT_EQ(a.hash, b.hash);
  EXPECT_NE(a.hash, c.hash);
  EXPECT_EQ(a.hash.size(), 32u);
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(b.name, "program") << "a shell reads the name";
  EXPECT_THAT(tests::message_of<base::UsageError>([] { read_staged_file("/nowhere"); }),
              HasSubstr("--ship: \"/nowhere\": No such file"));
  EXPECT_THAT(tests::message_of<base::UsageError>([] { read_staged_file("/tmp"); }), HasSubstr("not a regular file"));
}

TEST(FileStaging, ExistingFilesAreNotSent) {
  FileStaging one = staging({staged_file("lockstep", "first"), staged_file("train", "second")});
  std::string output = "y\ny\nframes";
  one.consume(output);
  EXPECT_EQ(output, "frames");
  EXPECT_TRUE(one.complete());
}

TEST(FileStaging, MissingFilesAreSentInOrder) {
  FileStaging one = staging({staged_file("lockstep", "first"), staged_file("train", "second")});
  EXPECT_EQ(one.pending_bytes(), "");
  std::string output = "n";
  one.consume(output);
  EXPECT_EQ(one.pending_bytes(), "");
  output += "\n";
  one.consume(output);
  EXPECT_EQ(output, "");
  EXPECT_EQ(one.pending_bytes(), "first");
  one.advance(3);
  EXPECT_EQ(one.pending_bytes(), "st");
  one.advance(2);
  EXPECT_EQ(one.pending_bytes(), "");
  EXPECT_FALSE(one.complete());
  output = "n\n";
  one.consume(output);
  EXPECT_EQ(one.pending_bytes(), "second");
  EXPECT_FALSE(one.complete());
  one.advance(6);
  EXPECT_TRUE(one.complete());
}

TEST(FileStaging, UnexpectedRepliesAreRejected) {
  for (const char* text : {"Welcome\n", "n\nn\n", "yes\n"}) {
    FileStaging one = staging({staged_file("lockstep", "first"), staged_file("train", "second")});
    std::string output = text;
    EXPECT_THROW(one.consume(output), base::Error) << text;
  }
}

/// Runs the staging script with an agent that is a shell script.
process::ToolResult run_script(const std::string& cache, const StagedFile& one, const std::string& bytes) {
  return process::run_tool({.path = "/bin/sh",
                            .argv = {"sh", "-c", staging_script({one}, {"agent"})},
                            .environment = {"PATH=/usr/bin:/bin", "XDG_CACHE_HOME=" + cache},
                            .directory = {},
                            .input = bytes});
}

TEST(FileStaging, PartialFilesAreNotInstalled) {
  const tests::TempDir folder;
  const std::string cache = folder / "cache", program = "#!/bin/sh\necho $0 $*\n";
  const StagedFile one = {.name = "program", .hash = "0123", .content = program};
  EXPECT_EQ(run_script(cache, one, program.substr(0, 20)).code, 125);
  const process::ToolResult whole = run_script(cache, one, program);
  EXPECT_EQ(whole.out, "n\n" + cache + "/lockstep/0123/program agent\n") << whole.err;
  EXPECT_EQ(run_script(cache, one, "").out, "y\n" + cache + "/lockstep/0123/program agent\n");
}

TEST(FileStaging, DamagedFilesAreReplaced) {
  const tests::TempDir folder;
  const std::string cache = folder / "cache", program = "#!/bin/sh\necho $0 $*\n",
                    path = cache + "/lockstep/0123/program";
  const StagedFile one = {.name = "program", .hash = "0123", .content = program};
  EXPECT_THAT(run_script(cache, one, program).out, HasSubstr("n\n"));
  for (const std::string& damaged : {std::string(program.size(), 'x'), program + "exit\n", std::string()}) {
    std::ofstream(path, std::ios::binary) << damaged;
    EXPECT_EQ(run_script(cache, one, program).out, "n\n" + path + " agent\n");
    EXPECT_EQ(tests::read_file(path), program);
  }
}

TEST(FileStaging, FoldersAreUnpackedBesideTheirArchive) {
  const tests::TempDir folder;
  const std::string cache = folder / "cache", source = folder / "source";
  std::filesystem::create_directories(source + "/part/__pycache__");
  std::filesystem::create_directories(source + "/.git");
  for (const char* name :
       {"/train.py", "/part/x.py", "/part/d\u00e9j\u00e0 vu.py", "/part/__pycache__/x.pyc", "/.git/config"})
    std::ofstream(source + name) << name;
  std::filesystem::create_symlink("train.py", source + "/link.py");
  StagedFile archive = read_staged_folder(source, "inside");
  EXPECT_EQ(archive.hash, read_staged_folder(source, "inside").hash);
  archive.option = "--staged-script";
  const StagedFile agent = {.name = "agent", .hash = "0123", .content = "#!/bin/sh\necho $*\n"};
  const auto run = [&](const std::string& bytes) {
    return process::run_tool({.path = "/bin/sh",
                              .argv = {"sh", "-c", staging_script({agent, archive}, {"word"})},
                              .environment = {"PATH=/usr/bin:/bin", "XDG_CACHE_HOME=" + cache},
                              .directory = {},
                              .input = bytes});
  };
  const std::string there = cache + "/lockstep/" + archive.hash + "/files";
  EXPECT_EQ(run(agent.content + archive.content).out, "n\nn\nword --staged-script " + there + "\n");
  EXPECT_EQ(tests::read_file(there + "/inside/part/x.py"), "/part/x.py");
  EXPECT_EQ(tests::read_file(there + "/inside/link.py"), "/train.py");
  EXPECT_FALSE(std::filesystem::exists(there + "/inside/.git"));
  EXPECT_FALSE(std::filesystem::exists(there + "/inside/part/__pycache__"));
  EXPECT_EQ(run("").out, "y\ny\nword --staged-script " + there + "\n");
  std::filesystem::remove_all(there);
  EXPECT_EQ(run("").out, "y\ny\nword --staged-script " + there + "\n");
  EXPECT_EQ(tests::read_file(there + "/inside/train.py"), "/train.py") << "what is missing is unpacked again";
  std::ofstream(there + "/inside/output") << "of a job";
  EXPECT_EQ(run("").out, "y\ny\nword --staged-script " + there + "\n");
  EXPECT_EQ(tests::read_file(there + "/inside/output"), "of a job");
  std::ofstream(there + "/inside/train.py") << "changed";
  EXPECT_EQ(run("").out, "y\ny\nword --staged-script " + there + "\n");
  EXPECT_EQ(tests::read_file(there + "/inside/train.py"), "/train.py") << "what was changed is unpacked again";
  EXPECT_EQ(tests::read_file(there + "/inside/train.py.changed"), "changed");
  EXPECT_EQ(tests::read_file(there + "/inside/output"), "of a job");
  EXPECT_FALSE(std::filesystem::exists(there + "/inside/part/x.py.changed"));
  std::ofstream(there + "/inside/train.py") << "changed";
  archive.is_in_use = true;
  EXPECT_EQ(run("").out, "y\ny\nword --staged-script " + there + "\n");
  EXPECT_EQ(tests::read_file(there + "/inside/train.py"), "changed") << "by the job itself, before it was restarted";
}

TEST(FileStaging, WhatCannotBePackedIsLeftOut) {
  const tests::TempDir folder;
  const std::string source = folder / "source", cache = folder / "cache";
  std::filesystem::create_directories(source + "/part");
  std::ofstream(source + "/train.py") << "train";
  std::ofstream(folder / "data") << "outside";
  std::filesystem::create_symlink("../data", source + "/data");
  std::filesystem::create_symlink("nothing", source + "/dangling");
  std::filesystem::create_symlink(".", source + "/latest");
  std::filesystem::create_symlink("../part", source + "/part/itself");
  std::filesystem::create_symlink("a", source + "/a");
  ::setenv("TAR_OPTIONS", "--exclude=train.py", 1);
  const std::string expected = read_staged_folder(source).hash;
  ::unsetenv("TAR_OPTIONS");
  ::testing::internal::CaptureStderr();
  StagedFile archive = read_staged_folder(source);
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(archive.hash, expected);
  EXPECT_THAT(warnings, HasSubstr("--ship leaves out ./dangling: No such file"));
  EXPECT_THAT(warnings, HasSubstr("--ship leaves out ./latest: a link to a folder that contains it"));
  EXPECT_THAT(warnings, HasSubstr("--ship leaves out ./part/itself: a link to a folder that contains it"));
  EXPECT_THAT(warnings, HasSubstr("--ship leaves out ./a: "));
  archive.option = "--staged-script";
  const StagedFile agent = {.name = "agent", .hash = "0123", .content = "#!/bin/sh\necho $*\n"};
  process::run_tool({.path = "/bin/sh",
                     .argv = {"sh", "-c", staging_script({agent, archive}, {"word"})},
                     .environment = {"PATH=/usr/bin:/bin", "XDG_CACHE_HOME=" + cache},
                     .directory = {},
                     .input = agent.content + archive.content});
  const std::string there = cache + "/lockstep/" + archive.hash + "/files";
  EXPECT_EQ(tests::read_file(there + "/train.py"), "train");
  EXPECT_EQ(tests::read_file(there + "/data"), "outside");
  EXPECT_FALSE(std::filesystem::exists(there + "/latest"));
}

TEST(FileStaging, ChecksumIsThatOfCksum) {
  EXPECT_EQ(posix_checksum(""), 4294967295u);
  EXPECT_EQ(posix_checksum("123456789"), 930766865u);
}

TEST(FileStaging, ScriptContainsNoSingleQuote) {
  StagedFile program = staged_file("train", "");
  program.option = "--staged-program";
  const std::string script = staging_script({staged_file("lockstep", "12345"), program}, {"agent", "--guarded"});
  EXPECT_THAT(script, Not(HasSubstr("'")));
  EXPECT_THAT(script, HasSubstr("put " + std::string(32, 'a') + " lockstep 5 " +
                                std::to_string(posix_checksum("12345")) + "; "));
  EXPECT_THAT(script, HasSubstr("/lockstep\" agent --guarded --staged-program \"$c/"));
}

}  // namespace
}  // namespace lockstep::launcher::hosts
