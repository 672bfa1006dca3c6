// unit_train_samples KIND FOLDER: files that readers.py reads.
#include <cmath>
#include <cstring>
#include <limits>

#include "lockstep/train/view/loggers.h"

namespace lockstep::train {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Ten steps by a run that dies, the last four again by one that goes on from step 6.
void log_values(const std::string& folder) {
  const LoggerOptions options{.directory = folder, .json_lines = true};
  {
    Loggers died(0, options);
    for (int step = 0; step < 10; ++step) died.scalars(step, {{"train/loss", 10.0 - step}});
  }
  LoggerOptions again = options;
  again.first_step = 6;
  Loggers loggers(0, again);
  for (int step = 6; step < 10; ++step) loggers.scalars(step, {{"train/loss", 100.0 + step}, {"learning rate", 0.1}});
  loggers.scalars(10, {{"odd", kNan}, {"a,\"b\"", kInfinity}, {"bad \xff utf-8", -kInfinity}});
  loggers.scalars(11, {{"odd", 0.1}, {"tiny", 1e-310}});
  loggers.text(3, "sample", "first line\nsecond: \xe2\x9c\x93 \xff <b>");
  std::vector<float> numbers;
  for (int i = 0; i < 1000; ++i) numbers.push_back(static_cast<float>(i) / 100 - 5);
  numbers.push_back(static_cast<float>(kNan));
  loggers.histogram(4, "fc.weight", histogram_of(numbers));
  loggers.histogram(5, "fc.weight", histogram_of(std::vector<double>{2, 2, 2}));
  Image image{.width = 3, .height = 2, .channels = 3};
  for (int i = 0; i < 18; ++i) image.bytes.push_back(static_cast<std::uint8_t>(10 * i));
  loggers.image(7, "input", image);
  loggers.image(8, "grey", {.width = 2, .height = 1, .channels = 1, .bytes = {0, 255}});
}

}  // namespace
}  // namespace lockstep::train

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  if (std::strcmp(argv[1], "values") == 0) lockstep::train::log_values(argv[2]);
  else return 64;
  return 0;
}
