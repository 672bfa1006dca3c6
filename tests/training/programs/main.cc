// Runs programs one after another on the ranks of this job:
//   training_programs DIRECTORY NAME...     rank 0 writes the results of each to DIRECTORY/NAME
//   training_programs --list                prints a line per program: name, tolerance, reference, flags, warning
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/training/programs/program.h"

namespace {

using lockstep::tests::programs::Program;
using lockstep::tests::programs::Run;

std::vector<Program> all_programs() {
  using namespace lockstep::tests::programs;  // NOLINT(google-build-using-namespace)
  std::vector<Program> programs;
  for (auto* const list :
       {supervised_programs, generative_programs, sequence_programs, autograd_programs, parameter_programs,
        module_programs, precision_programs, process_programs, resuming_programs, update_programs})
    for (const Program& program : list()) programs.push_back(program);
  return programs;
}

int print_list() {
  for (const Program& program : all_programs())
    std::cout << program.name << '\t' << program.tolerance << '\t'
              << (program.reference.empty() ? program.name : program.reference) << '\t'
              << (program.must_differ ? "differs" : "equal") << '\t' << program.warning << '\n';
  return 0;
}

void run_program(const Program& program, const lockstep::Group& world, const std::string& directory) {
  const std::string folder = directory + "/" + program.name + ".files";
  if (world.rank() == 0) std::filesystem::create_directories(folder);
  world.barrier();
  Run run(world, folder, program.optimizers);
  program.train(run);
  if (world.rank() == 0) run.write(directory + "/" + program.name);
}

int run_programs(int argc, char** argv) {
  const std::vector<Program> programs = all_programs();
  lockstep::Group world = lockstep::init();
  for (int i = 2; i < argc; ++i) {
    const auto program =
        std::find_if(programs.begin(), programs.end(), [&](const Program& one) { return one.name == argv[i]; });
    if (program == programs.end()) throw std::runtime_error(std::string("no program is called ") + argv[i]);
    std::cerr << "program " << program->name << std::endl;  // on each rank, for the warnings that follow
    run_program(*program, world, argv[1]);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--list") return print_list();
  if (argc < 3) return 64;
  return lockstep::main(argc, argv, run_programs);
}
