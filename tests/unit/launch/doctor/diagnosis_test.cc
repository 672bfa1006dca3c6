#include "lockstep/launch/doctor/diagnosis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

namespace lockstep::launcher::doctor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

constexpr std::uint64_t kGib = std::uint64_t{1} << 30;
constexpr const char* kPython =
    R"({"python": "3.11.2", "torch": "2.11.0", "cuda": "12.8", "nccl": "2.27.5", "prefix": "/usr", "no_cuda": "",)"
    R"( "packages": {"numpy": "1.26.4", "local": "?"}})";

/// The same with one value replaced.
std::string python_with(const std::string& from, const std::string& to) {
  std::string text = kPython;
  return text.replace(text.find(from), from.size(), to);
}

HostReport healthy(const std::string& name, int number) {
  HostReport host{.name = name, .via = "ssh", .reached = true, .startup_time = 300ms};
  host.info = {.host = name,
               .version = "0.1.0",
               .build = "abcdef",
               .cpus = {{0, 0, 0}, {1, 1, 0}, {2, 2, 0}, {5, 5, 0}},
               .master_port = 41000};
  host.clock_offset = 2ms;
  const std::string address = "10.0.0." + std::to_string(number);
  host.route = protocol::Route{0, 0, {address, 4000}, "eth0"};
  HostFacts facts;
  facts.program = {.path = "/app/train", .error = "", .hash = "77aa", .loader = "", .python = "/usr/bin/python3"};
  facts.python = {"/usr/bin/python3", 0, kPython};
  facts.probe = {"/opt/lockstep-probe", 0, R"({"libtorch":"2.11.0","cuda":"12.8","nccl":"2.27.5"})"};
  facts.nvidia_smi = {"/usr/bin/nvidia-smi", 0, "NVIDIA H200, 143771, 570.86.15\nNVIDIA H200, 143771, 570.86.15\n"};
  facts.resolved = {"/usr/bin/getent", 0, address + "  STREAM " + name + "\n" + address + "  DGRAM\n"};
  facts.orted = "/usr/bin/orted";
  facts.mpirun = {"/usr/bin/mpirun", 0, "mpirun (Open MPI) 4.1.4\n\nReport bugs\n"};
  facts.addresses = {{"lo", "127.0.0.1", true}, {"eth0", address, false}, {"docker0", "172.17.0.1", false}};
  facts.cpus_online = 8;
  facts.memory_bytes = 64 * kGib;
  facts.available_bytes = 60 * kGib;
  facts.shm_bytes = facts.shm_free_bytes = 32 * kGib;
  facts.memlock_bytes = -1;
  facts.files_soft = 1024;
  facts.files_hard = 1048576;
  facts.huge_page_bytes = 2 << 20;
  facts.transparent_huge_pages = "madvise";
  facts.copy_bytes_per_s = 10e9;
  host.facts = facts;
  return host;
}

/// Returns facts about three hosts that have no problem.
DoctorFacts healthy_facts() {
  DoctorFacts all{.hosts = {healthy("h1", 1), healthy("h2", 2), healthy("h3", 3)}, .model_bytes = 250'000'000};
  for (std::size_t from = 0; from < 3; ++from)
    for (std::size_t to = from + 1; to < 3; ++to)
      all.links.push_back(
          {.from = from, .to = to, .speed = {.round_trip_ns = 120'000, .bytes = 64 << 20, .ns = 57'000'000}});
  all.own_mpirun = {"/usr/bin/mpirun", 0, "mpirun (Open MPI) 4.1.4\n\nReport bugs\n"};
  return all;
}

Finding find_finding(const DoctorFacts& faulty, const std::string& host, const std::string& check) {
  for (const Finding& finding : diagnose(faulty))
    if (finding.host == host && finding.check == check) return finding;
  ADD_FAILURE() << "no finding for check " << check << " of host " << host;
  return {};
}

/// Returns all findings that are not ok, as "host check".
std::vector<std::string> problems(const DoctorFacts& faulty) {
  std::vector<std::string> all;
  for (const Finding& finding : diagnose(faulty))
    if (finding.severity != Severity::kOk) all.push_back(finding.host + " " + finding.check);
  return all;
}

/// Injects one fault into h2 and checks that it is the only problem.
void expect_fault(const char* check, Severity severity, const std::string& value, const std::string& remedy,
                  const std::function<void(HostReport&)>& inject) {
  DoctorFacts faulty = healthy_facts();
  inject(faulty.hosts[1]);
  const Finding finding = find_finding(faulty, "h2", check);
  EXPECT_EQ(finding.severity, severity) << finding.value;
  EXPECT_THAT(finding.value, HasSubstr(value));
  EXPECT_THAT(finding.remedy, HasSubstr(remedy));
  EXPECT_THAT(problems(faulty), ::testing::ElementsAre(std::string("h2 ") + check));
}

TEST(Diagnosis, HealthyHostsHaveNoProblems) {
  EXPECT_THAT(problems(healthy_facts()), ::testing::IsEmpty());
  EXPECT_EQ(find_finding(healthy_facts(), "h1", "reached").value, "through ssh in 300 ms");
  EXPECT_EQ(find_finding(healthy_facts(), "h1", "cores").value, "4 cores, mask 0-2,5 of 8 CPUs");
  EXPECT_EQ(find_finding(healthy_facts(), "h1", "GPUs").value, "2 x NVIDIA H200, 140.4 GiB");
  EXPECT_EQ(find_finding(healthy_facts(), "h1", "interface").value,
            "eth0 10.0.0.1, of 10.0.0.1 (eth0), 172.17.0.1 (docker0)");
  EXPECT_EQ(find_finding(healthy_facts(), "h1 - h3", "speed").value, "9.42 Gb/s, round trip 0.12 ms");
}

TEST(Diagnosis, MissingProgram) {
  expect_fault("program", Severity::kBad, "/app/train: No such file", "copy it",
               [](HostReport& host) { host.facts->program.error = "No such file or directory"; });
}

TEST(Diagnosis, DifferentProgramBuild) {
  expect_fault("program", Severity::kBad, "/app/train (99bb); h1 has 77aa", "same build",
               [](HostReport& host) { host.facts->program.hash = "99bb"; });
}

TEST(Diagnosis, DifferentLockstepBuild) {
  expect_fault("lockstep", Severity::kBad, "lockstep there is build", "install", [](HostReport& host) {
    host.failed = "lockstep there is build \"1\"; expected 2";
    host.hint = "install the same build there";
    host.facts.reset();
  });
}

TEST(Diagnosis, DifferentTorchInPython) {
  expect_fault(
      "Python", Severity::kBad, "torch 2.10.0 for CUDA 12.8; h1 has 2.11.0 for CUDA 12.8",
      "-m pip install torch==2.11.0", [](HostReport& host) {
        host.facts->python.out =
            "warning: x\n{\"python\": \"3.11.2\", \"torch\": \"2.10.0\", \"cuda\": \"12.8\", \"nccl\": \"2.27.5\"}";
      });
}

TEST(Diagnosis, PythonWithoutTorch) {
  expect_fault("Python", Severity::kBad, "has no torch: ModuleNotFoundError", "-m pip install torch==2.11.0",
               [](HostReport& host) {
                 host.facts->python.out =
                     R"({"python": "3.11.2", "error": "ModuleNotFoundError: No module named 'torch'"})";
               });
}

TEST(Diagnosis, DifferentPackage) {
  expect_fault("packages", Severity::kBad, "numpy is 2.0.1, h1 has 1.26.4", "for /usr/bin/python3",
               [](HostReport& host) { host.facts->python.out = python_with("1.26.4", "2.0.1"); });
}

TEST(Diagnosis, MissingPackage) {
  expect_fault("packages", Severity::kBad, "numpy is not installed, h1 has 1.26.4", "for /usr/bin/python3",
               [](HostReport& host) { host.facts->python.out = python_with("1.26.4", ""); });
}

TEST(Diagnosis, InterpreterOfAnotherEnvironment) {
  expect_fault("environment", Severity::kWarn, "Python is that of /usr, not of the active environment /home/me/venv",
               "start /home/me/venv/bin/python", [](HostReport& host) {
                 host.facts->python.out = python_with(R"("prefix")", R"("environment": "/home/me/venv", "prefix")");
               });
}

TEST(Diagnosis, ReasonWithoutCuda) {
  expect_fault("CUDA", Severity::kBad, "torch.cuda.is_available() is false: Found no NVIDIA driver", "nvidia-smi",
               [](HostReport& host) {
                 host.facts->python.out = python_with(R"("no_cuda": "")", R"("no_cuda": "Found no NVIDIA driver")");
               });
}

TEST(Diagnosis, PackageThatNoHostHas) {
  DoctorFacts facts = healthy_facts();
  for (HostReport& host : facts.hosts) host.facts->python.out = python_with("1.26.4", "");
  int warnings = 0;
  for (const auto& findings : diagnose_software(facts))
    for (const Finding& finding : findings)
      if (finding.check == std::string("packages")) warnings += finding.severity == Severity::kWarn;
  EXPECT_EQ(warnings, 3);
}

TEST(Diagnosis, DriverTooOld) {
  expect_fault("driver", Severity::kBad, "470.57.02 is too old for CUDA 12.8 of torch, which needs 525",
               "update NVIDIA's driver", [](HostReport& host) {
                 host.facts->nvidia_smi.out = "Tesla T4, 15360, 470.57.02\nTesla T4, 15360, 470.57.02\n";
               });
}

TEST(Diagnosis, NameResolvesToLoopback) {
  expect_fault(
      "name", Severity::kWarn,
      "h2 resolves to 127.0.1.1, a loopback address, which no other host can reach; its addresses are 10.0.0.2 (eth0), "
      "172.17.0.1 (docker0)",
      "/etc/hosts", [](HostReport& host) { host.facts->resolved.out = "127.0.1.1  STREAM h2\n"; });
  expect_fault("name", Severity::kWarn, "h2 resolves to 172.17.0.1, docker0, which no other host can reach",
               "/etc/hosts", [](HostReport& host) { host.facts->resolved.out = "172.17.0.1  STREAM h2\n"; });
}

TEST(Diagnosis, ContainerInterface) {
  expect_fault("interface", Severity::kBad,
               "docker0 172.17.0.1, which no other host can reach; its addresses are 10.0.0.2 (eth0)", "--interface",
               [](HostReport& host) { host.route = protocol::Route{0, 0, {"172.17.0.1", 4000}, "docker0"}; });
}

TEST(Diagnosis, FullShm) {
  expect_fault("/dev/shm", Severity::kBad, "4 KiB free of 32.0 GiB: it is full", "df -h /dev/shm",
               [](HostReport& host) { host.facts->shm_free_bytes = 4096; });
  expect_fault("/dev/shm", Severity::kWarn, "64 MiB free of 64 MiB: it is small", "--shm-size",
               [](HostReport& host) { host.facts->shm_bytes = host.facts->shm_free_bytes = 64 << 20; });
}

TEST(Diagnosis, ClockOffset) {
  expect_fault("clock", Severity::kBad, "3600 s behind this host's", "set-ntp",
               [](HostReport& host) { host.clock_offset = -1h; });
  expect_fault("clock", Severity::kWarn, "2 s ahead of this host's", "set-ntp",
               [](HostReport& host) { host.clock_offset = 2s; });
}

TEST(Diagnosis, ClosedPort) {
  DoctorFacts faulty = healthy_facts();
  faulty.links[1].reaches = false;
  faulty.links[1].speed = {.error = "h1 cannot reach 10.0.0.3: no answer"};
  EXPECT_THAT(problems(faulty), ::testing::ElementsAre("h1 - h3 connect"));
  const Finding finding = find_finding(faulty, "h1 - h3", "connect");
  EXPECT_EQ(finding.severity, Severity::kBad);
  EXPECT_THAT(finding.remedy, AllOf(HasSubstr("firewall"), HasSubstr("--interface")));
}

TEST(Diagnosis, MissingLibraries) {
  expect_fault("libraries", Severity::kBad, "2 libraries of the program not found: libff.so, libgg.so.1",
               "LD_LIBRARY_PATH", [](HostReport& host) {
                 host.facts->libraries = {
                     "/lib64/ld.so", 0,
                     "\tlibff.so => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\tlibgg.so.1 => not found\n"};
               });
}

// In a virtual environment with the packages of the system, torch is in another folder than Lockstep.
TEST(Diagnosis, ProbeWithoutLibtorchMattersOnlyForPrograms) {
  DoctorFacts facts = healthy_facts();
  for (HostReport& host : facts.hosts)
    host.facts->probe = {"/v/bin/lockstep-probe", 127, "", "libtorch_cpu.so: cannot open shared object file"};
  EXPECT_THAT(problems(facts), ::testing::IsEmpty());
  for (HostReport& host : facts.hosts) host.facts->program.python = host.facts->python.path = "";
  EXPECT_EQ(find_finding(facts, "h1", "libtorch").severity, Severity::kBad);
}

TEST(Diagnosis, LimitsAreCheckedWhereTheyMatter) {
  expect_fault("memlock", Severity::kWarn, "8 MiB, too little for InfiniBand", "memlock", [](HostReport& host) {
    host.facts->infiniband = true;
    host.facts->memlock_bytes = 8 << 20;
  });
  expect_fault("open files", Severity::kWarn, "1024, hard limit 2048", "nofile",
               [](HostReport& host) { host.facts->files_hard = 2048; });
  expect_fault("memory", Severity::kWarn,
               "512 MiB available of 64.0 GiB, limited by the control group /sys/fs/cgroup/a", "limit",
               [](HostReport& host) {
                 host.facts->available_bytes = 512 << 20;
                 host.facts->memory_cgroup = "/sys/fs/cgroup/a";
               });
}

TEST(Diagnosis, UnreachableHostHasOneFinding) {
  DoctorFacts faulty = healthy_facts();
  faulty.hosts[2] = {.name = "h3", .failed = "unknown host", .hint = "check DNS"};
  faulty.links.resize(1);
  EXPECT_THAT(problems(faulty), ::testing::ElementsAre("h3 reached"));
  EXPECT_EQ(find_finding(faulty, "h3", "reached").remedy, "check DNS");
}

TEST(Diagnosis, SilentAgentIsReported) {
  expect_fault("agent", Severity::kBad, "did not reply within 90 s", "dmesg", [](HostReport& host) {
    host.facts.reset();
    host.route.reset();
    host.lost = "its agent did not reply within 90 s";
  });
}

TEST(Diagnosis, MpiIsComparedWithTheLaunchers) {
  const auto with_mpi = [](const std::function<void(HostReport&)>& inject) {
    DoctorFacts faulty = healthy_facts();
    faulty.mpi = true;
    inject(faulty.hosts[1]);
    return find_finding(faulty, "h2", "MPI");
  };
  EXPECT_EQ(with_mpi([](HostReport&) {}).value, "/usr/bin/orted of Open MPI 4.1.4");
  const Finding none = with_mpi([](HostReport& host) { host.facts->orted.clear(); });
  EXPECT_EQ(none.severity, Severity::kBad);
  EXPECT_THAT(none.remedy, AllOf(HasSubstr("install Open MPI 4.1.4"), HasSubstr("mpirun --prefix DIR")));
  const Finding other = with_mpi([](HostReport& host) { host.facts->mpirun.out = "mpirun (Open MPI) 3.1.3\n"; });
  EXPECT_EQ(other.severity, Severity::kBad);
  EXPECT_THAT(other.value, HasSubstr("belongs to Open MPI 3.1.3, mpirun here is 4.1.4"));
}

TEST(Diagnosis, MajorityIsTheReference) {
  DoctorFacts faulty = healthy_facts();
  faulty.hosts[0].facts->program.hash = "99bb";
  EXPECT_THAT(problems(faulty), ::testing::ElementsAre("h1 program"));
  EXPECT_THAT(find_finding(faulty, "h1", "program").value, HasSubstr("h2 has 77aa"));
}

TEST(Diagnosis, SlowestLinkDeterminesNetworkCost) {
  DoctorFacts slow = healthy_facts();
  slow.links[2].speed = {.round_trip_ns = 300'000, .bytes = 125'000'000, .ns = 1'000'000'000};
  const Finding finding = find_finding(slow, "all", "network");
  EXPECT_EQ(finding.severity, Severity::kWarn);
  // 2 * 2/3 * 250 MB: 333 MB over 125 MB/s, over 1250 MB/s; 250 MB at 10 GB/s.
  EXPECT_EQ(finding.value,
            "this is a gigabit network: 2.7 s per step for 250 MB of gradients; 267 ms at 10 Gb/s, 25 ms on one host, "
            "333 ms when hosts exchange every 8 steps");
  EXPECT_THAT(finding.remedy, HasSubstr("average_hosts_every = 8"));
}

}  // namespace
}  // namespace lockstep::launcher::doctor
