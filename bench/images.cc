// Measures how many JPEG images per second the loader turns into samples. Started by images.py.
//
//   bench_images FOLDER KIND WORKERS SECONDS
//
// KIND: train, whole (train, but decoded in full size), validation, bytes (train, not normalized). Batches have 64
// samples of 224 x 224, normalized to floats on the consuming thread. Prints a line of JSON: images, seconds,
// cpu_seconds (of all threads).
#include <lockstep/data/datasets/image_dataset.h>
#include <lockstep/lockstep.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>

namespace {

using Clock = std::chrono::steady_clock;

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

int run(const std::string& folder, const std::string& kind, int workers, double seconds) {
  at::set_num_threads(1);
  const lockstep::data::ImageDataset images(lockstep::data::ImageFolder(folder),
                                            {.augment = kind != "validation", .shrink_in_decoder = kind != "whole"});
  auto loader = lockstep::data::make_loader(images, lockstep::data::DataShard{},
                                            {.batch_size = 64, .drop_last = true, .num_workers = workers});
  std::int64_t count = 0;
  double cpu = 0;
  auto begin = Clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  for (std::uint64_t epoch = 0; count == 0 || passed() < seconds; ++epoch)
    for (auto& batch : loader.epoch(epoch)) {
      const at::Tensor samples = kind == "bytes" ? batch.data : lockstep::data::normalize_images(batch.data);
      if (cpu == 0) {  // the first batch warms up
        cpu = cpu_seconds();
        begin = Clock::now();
      } else {
        count += samples.size(0);
      }
      if (count > 0 && passed() >= seconds) break;
    }
  std::printf("{\"images\": %lld, \"seconds\": %.3f, \"cpu_seconds\": %.3f}\n", static_cast<long long>(count), passed(),
              cpu_seconds() - cpu);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::main(argc, argv, [](int count, char** words) {
    if (count != 5) throw lockstep::UsageError("usage: bench_images FOLDER KIND WORKERS SECONDS");
    return run(words[1], words[2], std::stoi(words[3]), std::stod(words[4]));
  });
}
