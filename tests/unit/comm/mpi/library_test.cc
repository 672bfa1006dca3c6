#include "lockstep/comm/mpi/library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace lockstep::comm::mpi {
namespace {

using ::testing::HasSubstr;

base::Env environment(const std::map<std::string, std::string>& variables) {
  return base::Env([&](const char* name) -> base::Env::Value {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : base::Env::Value(found->second);
  });
}

TEST(MpiLibrary, ParsesVersionStrings) {
  const std::map<std::string, std::string> version_texts = {
      {"Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022", "Open MPI 4.1"},
      {"Open MPI v5.0.10rc1, package: x", "Open MPI 5.0"},
      {"MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7 12:34:45 CDT 2022\n", "MPICH 4.0"},
      {"MPICH Version:      4.2.1", "MPICH 4.2"},
      {"Intel(R) MPI Library 2021.18 for Linux* OS\n", "Intel MPI 2021.18"},
      {"MVAPICH2 Version      :\t2.3.7\n", "MVAPICH 2.3"},
      {"CRAY MPICH version 8.1.29.28 (ANL base 3.4a2)\n", "Cray MPICH 8.1"},
      {"Something else 3.2.1", "Something else 3.2"},
      {"no number at all", "no number at all"},
      {"", ""},
  };
  for (const auto& [text, read] : version_texts) EXPECT_EQ(to_string(parse_mpi_library(text)), read) << text;
}

TEST(MpiLibrary, MismatchComparesNameAndMajorMinorVersion) {
  const MpiLibrary built{"Open MPI", "4.1"};
  EXPECT_EQ(mpi_library_mismatch(built, {"Open MPI", "4.1"}), "");
  EXPECT_EQ(mpi_library_mismatch(built, {"Open MPI", "5.0"}),
            "this program was built with Open MPI 4.1, but the MPI library that is loaded is Open MPI 5.0");
  EXPECT_THAT(mpi_library_mismatch(built, {"MPICH", "4.1"}), HasSubstr("loaded is MPICH 4.1"));
  EXPECT_EQ(mpi_library_mismatch({}, {"MPICH", "4.1"}), "") << "the library of the build is not known";
}

TEST(MpiLibrary, LauncherMustMatchTheMpiLibrary) {
  const MpiLibrary open_mpi{"Open MPI", "4.1"};
  const MpiLibrary mpich{"MPICH", "4.0"};
  const auto by_mpirun = environment({{"OMPI_COMM_WORLD_RANK", "0"}, {"PMIX_RANK", "0"}});
  EXPECT_EQ(mpi_launcher_mismatch(by_mpirun, open_mpi), "");
  EXPECT_EQ(
      mpi_launcher_mismatch(by_mpirun, mpich),
      "the ranks were started by Open MPI's mpirun (OMPI_COMM_WORLD_RANK is set), but this program's MPI is MPICH 4.0");
  const auto by_hydra = environment({{"PMI_RANK", "0"}, {"MPI_LOCALRANKID", "0"}});
  EXPECT_EQ(mpi_launcher_mismatch(by_hydra, mpich), "");
  EXPECT_THAT(mpi_launcher_mismatch(by_hydra, open_mpi), HasSubstr("a launcher of another MPI"));
  EXPECT_THAT(mpi_launcher_mismatch(environment({{"PMI_RANK", "0"}, {"SLURM_PROCID", "0"}}), open_mpi),
              HasSubstr("srun --mpi=pmi2"));
  EXPECT_EQ(mpi_launcher_mismatch(environment({{"PMIX_RANK", "0"}}), mpich), "");
  EXPECT_THAT(mpi_launcher_mismatch(environment({{"RANK", "0"}}), open_mpi),
              HasSubstr("not started by an MPI launcher"));
}

}  // namespace
}  // namespace lockstep::comm::mpi
