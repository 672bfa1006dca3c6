#include "lockstep/train/report/progress_bar.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"

namespace lockstep::train {
namespace {

constexpr std::size_t kLongestBar = 30;
constexpr std::size_t kShortestBar = 10;
constexpr std::size_t kGap = 2;  // blanks between fields
constexpr int kPatienceMs = 500;
const char* const kEraseRow = "\r\x1b[K";
constexpr double kSmoothing = 0.05;  // weight of the newest step in the mean time of a step

struct Field {
  std::string text;
  int drop_order;  // the highest goes first when there is no room
};
constexpr int kBar = 90;

template <typename... Numbers>
std::string format(const char* pattern, Numbers... numbers) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, numbers...);
  return text;
}

/// Characters of UTF-8 text.
std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string format_value(double value) {
  const double size = std::abs(value);
  return format(value == 0 || (size >= 0.001 && size < 10000) ? "%.3f" : "%.3g", value);
}

std::string format_rate(double rate) {
  if (rate < 100) return format("%.1f", rate);
  if (rate < 1000) return format("%.0f", rate);
  if (rate < 99950) return format("%.1fk", rate / 1e3);
  return rate < 999500 ? format("%.0fk", rate / 1e3) : format("%.1fM", rate / 1e6);
}

std::string format_time(double seconds) {
  const auto all = static_cast<long long>(std::min(seconds, 1e12) + 0.5);
  if (all < 3600) return format("%lld:%02lld", all / 60, all % 60);
  return format("%lld:%02lld:%02lld", all / 3600, all / 60 % 60, all % 60);
}

double fraction_of(const ProgressState& state) {
  return std::clamp(static_cast<double>(state.step) / static_cast<double>(state.num_steps), 0.0, 1.0);
}

std::string bar_of(double fraction, std::size_t width) {
  const auto halves = static_cast<std::size_t>(fraction * 2 * static_cast<double>(width));
  std::string bar;
  for (std::size_t i = 0; i < width; ++i) bar += 2 * i + 2 <= halves ? "━" : 2 * i + 1 == halves ? "╸" : "─";
  return bar;
}

std::vector<Field> fields_of(const ProgressState& state) {
  std::vector<Field> fields;
  if (!state.label.empty()) fields.push_back({state.label, 45});
  if (state.num_epochs > 1)
    fields.push_back({format("epoch %lld/%lld", state.epoch + 1LL, 0LL + state.num_epochs), 40});
  fields.push_back({"", kBar});
  fields.push_back({format("%d%%", static_cast<int>(fraction_of(state) * 100)), 0});
  fields.push_back({format("%lld/%lld", 0LL + state.step, 0LL + state.num_steps), 20});
  int order = 51;
  for (const auto& [name, value] : state.values)
    fields.push_back({name + " " + format_value(value), std::min(order++, kBar - 1)});
  if (state.samples_per_second >= 0)
    fields.push_back({format_rate(state.samples_per_second) + " samples/s", kBar + 1});
  else if (state.steps_per_second >= 0)
    fields.push_back({format_rate(state.steps_per_second) + " steps/s", kBar + 1});
  if (state.seconds_left >= 0) fields.push_back({"ETA " + format_time(state.seconds_left), 50});
  return fields;
}

/// With the shortest bar.
std::size_t width_of(const std::vector<Field>& fields) {
  std::size_t width = 0;
  for (const Field& field : fields)
    width += (width > 0 ? kGap : 0) + (field.drop_order == kBar ? kShortestBar : width_of(field.text));
  return width;
}

std::string joined(const std::vector<Field>& fields) {
  std::string line;
  for (const Field& field : fields) line += (line.empty() ? "" : std::string(kGap, ' ')) + field.text;
  return line;
}

void require(const ProgressOptions& options) {
  if (options.num_epochs < 1 || options.steps_per_epoch < 1)
    throw base::UsageError("ProgressOptions: " + std::to_string(options.num_epochs) + " epochs of " +
                           std::to_string(options.steps_per_epoch) + " steps; allowed is at least 1 of each");
  if (options.steps_done < 0 || options.samples_per_step < 0)
    throw base::UsageError("ProgressOptions: steps_done is " + std::to_string(options.steps_done) +
                           ", samples_per_step " + std::to_string(options.samples_per_step) + "; allowed is 0 or more");
  if (options.redraw_every.count() < 0 || options.line_every.count() < 0)
    throw base::UsageError("ProgressOptions: redraw_every is " + std::to_string(options.redraw_every.count()) +
                           " ms, line_every " + std::to_string(options.line_every.count()) +
                           " ms; allowed is 0 or more");
}

}  // namespace

std::string progress_line(const ProgressState& state, int columns) {
  std::vector<Field> fields = fields_of(state);
  if (columns <= 0) {
    std::erase_if(fields, [](const Field& field) { return field.drop_order == kBar; });
    return joined(fields);
  }
  const auto room = static_cast<std::size_t>(columns - 1);  // in the last column some terminals begin a new row
  const auto less = [](const Field& a, const Field& b) { return a.drop_order < b.drop_order; };
  while (fields.size() > 1 && width_of(fields) > room)
    fields.erase(std::max_element(fields.begin(), fields.end(), less));
  const std::size_t spare = room - std::min(room, width_of(fields));
  for (Field& field : fields)
    if (field.drop_order == kBar) field.text = bar_of(fraction_of(state), std::min(kLongestBar, kShortestBar + spare));
  return joined(fields).substr(0, width_of(fields) > room ? room : std::string::npos);
}

int terminal_columns(const base::Env& env) {
  if (env.term == "dumb") return 0;
  if (env.lockstep_terminal) {
    const auto columns = base::parse_int(*env.lockstep_terminal);
    return columns && *columns > 0 && *columns < 10000 ? static_cast<int>(*columns) : 0;
  }
  winsize size{};
  if (::isatty(STDOUT_FILENO) == 0 || ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_col > 0 ? size.ws_col : 80;
}

Progress::Progress(int rank, const ProgressOptions& options)
    : options_(options),
      shown_(rank == 0),
      steps_(options.steps_done),
      last_step_(Clock::now()),
      last_line_(last_step_) {
  require(options);
  const base::Env& env = base::Env::process();
  if (shown_ && terminal_columns(env) > 0) screen_ = env.lockstep_terminal ? Screen::kLauncher : Screen::kTerminal;
}

Progress::~Progress() {
  if (!row_open_) return;
  row_open_ = false;
  if (options_.stays)
    write("\n", true);
  else if (screen_ == Screen::kTerminal)
    write(kEraseRow, true);  // a launcher puts the next bar in its place
}

bool Progress::advance() {
  if (!shown_) return false;
  const Clock::time_point now = Clock::now();
  measure(now, steps_++ % options_.steps_per_epoch == 0);
  const bool last_of_epoch = steps_ % options_.steps_per_epoch == 0;
  const std::chrono::milliseconds pause = screen_ == Screen::kNone ? options_.line_every : options_.redraw_every;
  if (now - last_line_ < pause && !(last_of_epoch && options_.stays)) return false;
  last_line_ = now;
  return true;
}

void Progress::measure(Clock::time_point now, bool first_of_epoch) {
  const double seconds = std::chrono::duration<double>(now - last_step_).count();
  last_step_ = now;
  if (first_of_epoch) return;  // evaluation, saving, or the start of the program lie in between
  step_seconds_ = step_seconds_ < 0 ? seconds : (1 - kSmoothing) * step_seconds_ + kSmoothing * seconds;
}

void Progress::draw(const NamedValues& values) {
  const std::int64_t per_epoch = options_.steps_per_epoch;
  ProgressState state{.label = options_.label,
                      .epoch = (steps_ - 1) / per_epoch,
                      .num_epochs = options_.num_epochs,
                      .step = (steps_ - 1) % per_epoch + 1,
                      .num_steps = per_epoch,
                      .values = values};
  if (step_seconds_ > 0) {
    if (options_.samples_per_step > 0)
      state.samples_per_second = static_cast<double>(options_.samples_per_step) / step_seconds_;
    state.steps_per_second = 1 / step_seconds_;
    state.seconds_left =
        step_seconds_ * static_cast<double>(std::max<std::int64_t>(0, options_.num_epochs * per_epoch - steps_));
  }
  // The size may be another one since the last line.
  std::string line = progress_line(state, screen_ == Screen::kNone ? 0 : terminal_columns(base::Env::process()));
  const bool stays = screen_ == Screen::kNone || (state.step == per_epoch && options_.stays);
  if (screen_ == Screen::kTerminal) line.insert(0, kEraseRow);
  // The launcher knows by the \r that it is a bar. On a terminal the cursor stays behind it: what somebody else writes
  // then does not hide it.
  line += stays ? "\n" : screen_ == Screen::kLauncher ? "\r" : "";
  row_open_ = !stays;
  write(std::move(line), stays);
}

void Progress::print(std::string_view line) {
  if (!shown_) return;
  std::string text(line);
  if (screen_ == Screen::kTerminal && row_open_) text.insert(0, kEraseRow);
  row_open_ = row_open_ && screen_ == Screen::kLauncher;  // which keeps the bar below
  write(text + "\n", true);
  last_line_ -= options_.redraw_every;  // the next step draws
}

void Progress::write(std::string text, bool patient) {
  std::fflush(stdout);
  base::bar_stands(screen_ == Screen::kTerminal && row_open_);
  pollfd room{STDOUT_FILENO, POLLOUT, 0};
  if (::poll(&room, 1, patient ? kPatienceMs : 0) == 0) return;
  // Nobody can be told when it fails.
  [[maybe_unused]] const auto written = ::write(STDOUT_FILENO, text.data(), text.size());
}

}  // namespace lockstep::train
