#include "lockstep/launch/doctor/host_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "lockstep/launch/process/activity.h"
#include "lockstep/launch/process/process.h"
#include "tests/support/temp_dir.h"

namespace lockstep::launcher::doctor {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

const process::Environment kPath = {"PATH=/usr/local/bin:/usr/bin:/bin"};

std::string write(const tests::TempDir& folder, const std::string& name, const std::string& text, int mode = 0755) {
  const std::string path = folder / name;
  std::ofstream(path) << text;
  ::chmod(path.c_str(), static_cast<mode_t>(mode));
  return path;
}

// Packages that the script and the modules beside it import; not its own modules, Python's, or optional ones.
TEST(HostFacts, PackagesOfAScript) {
  const tests::TempDir folder;
  write(folder, "train.py",
        "import os, helper\nfrom pack.sub import x\nimport there.part\n"
        "try:\n  import optional_one\nexcept ImportError:\n  pass\nraise SystemExit('it must not run')\n");
  write(folder, "helper.py", "def f():\n  import gone_one\n");
  std::filesystem::create_directories(folder / "pack");
  write(folder, "pack/__init__.py", "");
  write(folder, "pack/sub.py", "import json\nimport broken +\n");
  const std::string site = folder / "site";
  std::filesystem::create_directories(site + "/there");
  std::filesystem::create_directories(site + "/There-1.2.3.dist-info");
  std::ofstream(site + "/there/__init__.py") << "raise SystemExit('nor may this')\n";
  std::ofstream(site + "/There-1.2.3.dist-info/METADATA") << "Metadata-Version: 2.1\nName: There\nVersion: 1.2.3\n";
  std::ofstream(site + "/There-1.2.3.dist-info/top_level.txt") << "there\n";
  const process::ToolResult result =
      process::run_tools({{process::find_tool("python3", kPath),
                           {"python3", "-c", kPythonFacts, folder / "train.py"},
                           {kPath[0], "PYTHONPATH=" + site, "VIRTUAL_ENV=" + folder.path()},
                           "",
                           60s}},
                         -1)[0];
  EXPECT_EQ(result.code, 0) << result.message();
  EXPECT_THAT(result.out, HasSubstr(R"("packages": {"gone_one": "", "there": "1.2.3"})"));
  EXPECT_THAT(result.out, HasSubstr("\"environment\": \"" + folder.path()));
}

// The current folder belongs to the user, who may have a file of any name there.
TEST(HostFacts, NoFileOfTheCurrentFolderRuns) {
  const tests::TempDir folder;
  for (const char* name : {"ast", "json", "os", "torch", "importlib"})
    write(folder, name + std::string(".py"), "raise SystemExit('a file of the current folder runs')\n");
  const process::ToolResult result = process::run_tools(
      {{process::find_tool("python3", kPath), {"python3", "-c", kPythonFacts}, kPath, folder.path(), 60s}}, -1)[0];
  EXPECT_EQ(result.code, 0) << result.message();
  EXPECT_THAT(result.out, HasSubstr("\"python\": \"3."));
}

TEST(HostFacts, ProgramKindsAreRecognised) {
  const tests::TempDir folder;
  const std::string directory = folder.path();
  EXPECT_EQ(inspect_program({}, "", kPath).path, "");
  EXPECT_EQ(inspect_program({"/nowhere/x"}, "", kPath).error, "No such file or directory");
  EXPECT_EQ(inspect_program({"no-such-program"}, "", kPath).error, "not in PATH");
  EXPECT_EQ(inspect_program({"./x"}, "/nowhere", kPath).error, "no such directory");
  write(folder, "data", "x", 0644);
  EXPECT_EQ(inspect_program({"./data"}, directory, kPath).error, "not executable");
  const ProgramFile shell = inspect_program({"sh"}, "", kPath);
  EXPECT_EQ(shell.error, "");
  EXPECT_EQ(shell.hash.size(), 16u);
  EXPECT_THAT(shell.loader, HasSubstr("ld"));
  EXPECT_EQ(shell.python, "");
}

TEST(HostFacts, EqualContentHasEqualHash) {
  const tests::TempDir folder;
  const std::string a = write(folder, "a", "#!/bin/sh\necho 1\n"), b = write(folder, "b", "#!/bin/sh\necho 1\n"),
                    c = write(folder, "c", "#!/bin/sh\necho 2\n");
  const auto hash = [](const std::string& path) { return inspect_program({path}, "", kPath).hash; };
  EXPECT_EQ(hash(a), hash(b));
  EXPECT_NE(hash(a), hash(c));
}

TEST(HostFacts, PythonScripts) {
  const tests::TempDir folder;
  const std::string python = write(folder, "python3", "#!/bin/sh\n");
  const std::string script = write(folder, "train.py", "print(1)\n", 0644);
  const ProgramFile named = inspect_program({python, "train.py"}, folder.path(), kPath);
  EXPECT_EQ(named.python, python);
  EXPECT_EQ(named.path, script);
  EXPECT_EQ(inspect_program({python, "gone.py"}, folder.path(), kPath).error, "No such file or directory");
  EXPECT_EQ(inspect_program({python, "-c", "x"}, "", kPath).path, python);
  EXPECT_EQ(inspect_program({write(folder, "direct", "#!" + python + "\n")}, "", kPath).python, python);
  EXPECT_EQ(
      inspect_program({write(folder, "by_env", "#!/usr/bin/env python3\n")}, "", {"PATH=" + folder.path()}).python,
      python);
  EXPECT_THAT(inspect_program({write(folder, "lost", "#!/nowhere/python3 -u\n")}, "", kPath).error,
              HasSubstr("its interpreter /nowhere/python3 does not exist"));
}

TEST(HostFacts, FactsOfThisHost) {
  const HostFacts facts = collect_host_facts({.command = {"sh"}, .environment = kPath}, -1);
  EXPECT_GT(facts.memory_bytes, facts.available_bytes / 2);
  EXPECT_GT(facts.files_hard, 0u);
  EXPECT_GE(facts.cpus_online, 1);
  EXPECT_GT(facts.copy_bytes_per_s, 1e8);
  EXPECT_TRUE(facts.libraries.succeeded());
  EXPECT_THAT(facts.libraries.out, HasSubstr("libc.so.6 => /"));
  EXPECT_EQ(facts.orted + facts.mpirun.path, "");  // not requested
}

process::ToolCommand shell(const std::string& script, std::chrono::milliseconds limit = 20s) {
  return {"/bin/sh", {"sh", "-c", script}, kPath, "", limit};
}

TEST(Tools, ReportOutputAndExitCode) {
  const auto results = process::run_tools({shell("echo out; echo err >&2; exit 3"),
                                           {},
                                           shell("kill -TERM $$"),
                                           {"/nowhere", {"x"}, {}, "", 1s},
                                           shell("pwd")},
                                          -1);
  EXPECT_EQ(results[0].out, "out\n");
  EXPECT_EQ(results[0].err, "err\n");
  EXPECT_EQ(results[0].code, 3);
  EXPECT_EQ(results[1].code, process::ToolResult::kNotRun);
  EXPECT_EQ(results[2].code, 128 + 15);
  EXPECT_EQ(results[3].code, 127);
  EXPECT_TRUE(results[4].succeeded());
}

TEST(Tools, InputIsPassedToStdin) {
  process::ToolCommand cat{"/bin/cat", {"cat"}, kPath};
  cat.input = std::string(20000, 'a') + std::string("\0'\n", 3);
  EXPECT_EQ(process::run_tool(cat).out, cat.input);
  EXPECT_EQ(process::run_tool(shell("cat; echo end")).out, "end\n");
}

TEST(Tools, TimeoutKillsTheProcessGroup) {
  const tests::TempDir folder;
  const auto begun = std::chrono::steady_clock::now();
  const auto results =
      process::run_tools({shell("echo begun; sleep 100 & echo $! >" + folder / "a" + "; sleep 100", 300ms),
                          shell("sleep 100 & echo $! >" + folder / "b" + "; echo left")},
                         -1);
  for (const char* file : {"a", "b"}) {
    const pid_t left = std::stoi(tests::read_file(folder / file));
    const auto runs = [&] { return std::string("Z?").find(process::sample_process(left).state) == std::string::npos; };
    while (runs() && std::chrono::steady_clock::now() - begun < 10s) std::this_thread::yield();
    EXPECT_FALSE(runs()) << file;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 10s);
  EXPECT_EQ(results[0].code, process::ToolResult::kTimedOut);
  EXPECT_EQ(results[0].out, "begun\n");
  EXPECT_EQ(results[1].out, "left\n");
  EXPECT_TRUE(results[1].succeeded());
}

TEST(Tools, EndWhenTheCallerIsGone) {
  base::Pipe pipe = base::make_pipe();
  pipe.write.reset();
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_EQ(process::run_tools({shell("sleep 100")}, pipe.read.get())[0].code, process::ToolResult::kTimedOut);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 10s);
}

TEST(Tools, OutputIsTruncatedAtTheLimit) {
  const auto results =
      process::run_tools({shell("i=0; while [ $i -lt 20000 ]; do echo 0123456789; i=$((i+1)); done")}, -1);
  EXPECT_TRUE(results[0].succeeded());
  EXPECT_EQ(results[0].out.size(), process::kMaxOutputBytes);
}

}  // namespace
}  // namespace lockstep::launcher::doctor
