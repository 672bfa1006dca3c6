// A rank that saves checkpoints, alternately itself and by a thread, until it is killed.
//   save_probe FOLDER
// Rank 0 first prints "found STEP complete NUMBER": the step of the newest checkpoint, after all ranks have compared it
// with what that step must have written (0 if there is none), and the number of complete checkpoints. Then it prints
// "saved STEP" for each durable checkpoint. A wrong value, or a leftover of a dead process that the first save did not
// remove, ends it with code 3.
#include <ATen/ops/full.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "lockstep/checkpoint/checkpointer.h"
#include "lockstep/comm/init.h"
#include "lockstep/comm/uncaught_exception.h"

namespace {

using namespace lockstep;
using checkpoint::SavedCheckpoint;
using checkpoint::value_of;

constexpr std::int64_t kElements = 1 << 16;

at::Tensor values(std::int64_t step, int rank) {
  return at::full({kElements + rank}, static_cast<double>(step * 100 + rank));
}

checkpoint::CheckpointParts parts_of(std::int64_t step, int rank) {
  checkpoint::CheckpointParts parts = {{"own", {{"values", values(step, rank)}, {"rank", std::int64_t{rank}}}}};
  if (rank == 0) parts["model"] = {{"weight", values(step, 50)}, {"step", step}};
  return parts;
}

bool has_expected_values(const SavedCheckpoint& saved) {
  const std::int64_t step = saved.step();
  const auto model = saved.read("model");
  bool equal =
      value_of<std::int64_t>(model, "step") == step && value_of<at::Tensor>(model, "weight").equal(values(step, 50));
  for (int rank = 0; rank < saved.world_size(); ++rank) {
    const auto own = saved.read("own", rank);
    equal = equal && value_of<std::int64_t>(own, "rank") == rank &&
            value_of<at::Tensor>(own, "values").equal(values(step, rank));
  }
  return equal;
}

bool is_complete(const std::string& path) {
  try {
    const SavedCheckpoint saved(path);
    bool complete = true;
    for (std::size_t i = 0; i < saved.manifest().files.size(); ++i)
      complete = complete && saved.find_damage(i, true).empty();
    return complete;
  } catch (const base::Error&) {
    return false;
  }
}

int num_complete(const std::string& folder) {
  int number = 0;
  for (const auto& name : checkpoint::list_checkpoints(folder))
    number += is_complete(folder + "/" + to_text(name)) ? 1 : 0;
  return number;
}

bool has_leftovers(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().filename().string().starts_with(".lockstep-tmp-")) return true;
  return false;
}

void print_on_rank_0(const comm::Group& world, const std::string& line) {
  if (world.rank() != 0) return;
  std::puts(line.c_str());
  std::fflush(stdout);
}

int run(const std::string& folder) {
  comm::Group world = comm::init();
  checkpoint::Checkpointer checkpoints(world, folder);
  const auto found = checkpoints.latest();
  if (found && !has_expected_values(*found)) return 3;
  std::int64_t step = found ? found->step() : 0;
  if (world.rank() == 0)
    print_on_rank_0(world, "found " + std::to_string(step) + " complete " + std::to_string(num_complete(folder)));
  ++step;
  checkpoints.save(step, parts_of(step, world.rank()));
  if (world.rank() == 0 && has_leftovers(folder)) return 3;
  print_on_rank_0(world, "saved " + std::to_string(step));
  for (;;) {
    ++step;
    if (step % 2 == 0) {
      checkpoints.save_async(step, parts_of(step, world.rank()));
      checkpoints.wait();
    } else {
      checkpoints.save(step, parts_of(step, world.rank()));
    }
    print_on_rank_0(world, "saved " + std::to_string(step));
  }
}

}  // namespace

int main(int argc, char** argv) {
  return comm::main(argc, argv, [](int count, char** words) {
    if (count != 2) throw base::UsageError("save_probe FOLDER");
    return run(words[1]);
  });
}
