#include "lockstep/train/report/progress_bar.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/parse.h"
#include "lockstep/base/telemetry/comm_time.h"

namespace lockstep::training::inline report {
namespace {

constexpr std::size_t kLongestBar = 30;
constexpr std::size_t kShortestBar = 10;
constexpr std::size_t kGap = 2;  // spaces between fields
constexpr int kWriteTimeoutMs = 500;
const char* const kEraseRow = "\r\x1b[K";
constexpr double kSmoothing = 0.05;  // weight of the newest step in the mean time of a step

struct ProgressField {
  std::string text;
  int drop_order;  // fields with higher values are dropped first when the line is too long
};
constexpr int kBarDropOrder = 90;

template <typename... Numbers>
std::string format_number(const char* pattern, Numbers... numbers) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, numbers...);
  return text;
}

/// Number of characters of UTF-8 text.
std::size_t display_width(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string format_value(double value) {
  const double size = std::abs(value);
  return format_number(value == 0 || (size >= 0.001 && size < 10000) ? "%.3f" : "%.3g", value);
}

std::string format_rate(double rate) {
  if (rate < 100) return format_number("%.1f", rate);
  if (rate < 1000) return format_number("%.0f", rate);
  if (rate < 99950) return format_number("%.1fk", rate / 1e3);
  return rate < 999500 ? format_number("%.0fk", rate / 1e3) : format_number("%.1fM", rate / 1e6);
}

std::string format_duration(double seconds) {
  const auto all = static_cast<long long>(std::min(seconds, 1e12) + 0.5);
  if (all < 3600) return format_number("%lld:%02lld", all / 60, all % 60);
  return format_number("%lld:%02lld:%02lld", all / 3600, all / 60 % 60, all % 60);
}

double completed_fraction(const ProgressBarState& state) {
  return std::clamp(static_cast<double>(state.step) / static_cast<double>(state.num_steps), 0.0, 1.0);
}

std::string draw_bar(double fraction, std::size_t width) {
  const auto halves = static_cast<std::size_t>(fraction * 2 * static_cast<double>(width));
  std::string bar;
  for (std::size_t i = 0; i < width; ++i) bar += 2 * i + 2 <= halves ? "━" : 2 * i + 1 == halves ? "╸" : "─";
  return bar;
}

std::vector<ProgressField> make_fields(const ProgressBarState& state) {
  std::vector<ProgressField> fields;
  if (!state.label.empty()) fields.push_back({state.label, 45});
  if (state.num_epochs > 1)
    fields.push_back({format_number("epoch %lld/%lld", state.epoch + 1LL, 0LL + state.num_epochs), 40});
  fields.push_back({"", kBarDropOrder});
  fields.push_back({format_number("%d%%", static_cast<int>(completed_fraction(state) * 100)), 0});
  fields.push_back({format_number("%lld/%lld", 0LL + state.step, 0LL + state.num_steps), 20});
  int order = 51;
  for (const auto& [name, value] : state.values)
    fields.push_back({name + " " + format_value(value), std::min(order++, kBarDropOrder - 1)});
  if (state.samples_per_second >= 0)
    fields.push_back({format_rate(state.samples_per_second) + " samples/s", kBarDropOrder + 1});
  else if (state.steps_per_second >= 0)
    fields.push_back({format_rate(state.steps_per_second) + " steps/s", kBarDropOrder + 1});
  if (state.comm_fraction >= 0)
    fields.push_back({format_number("comm %.0f%%", state.comm_fraction * 100), kBarDropOrder + 2});
  if (state.seconds_left >= 0) fields.push_back({"ETA " + format_duration(state.seconds_left), 50});
  return fields;
}

/// Width of the line with the shortest bar.
std::size_t display_width(const std::vector<ProgressField>& fields) {
  std::size_t width = 0;
  for (const ProgressField& field : fields)
    width += (width > 0 ? kGap : 0) + (field.drop_order == kBarDropOrder ? kShortestBar : display_width(field.text));
  return width;
}

std::string join_fields(const std::vector<ProgressField>& fields) {
  return base::joined(fields, std::string(kGap, ' '), [](const ProgressField& field) { return field.text; });
}

void require_valid_options(const ProgressBarOptions& options) {
  if (options.num_epochs < 1 || options.steps_per_epoch < 1)
    throw base::UsageError("ProgressBarOptions: num_epochs is " + std::to_string(options.num_epochs) +
                           " and steps_per_epoch is " + std::to_string(options.steps_per_epoch) +
                           "; expected at least 1 for each");
  if (options.steps_done < 0 || options.samples_per_step < 0)
    throw base::UsageError("ProgressBarOptions: steps_done is " + std::to_string(options.steps_done) +
                           " and samples_per_step is " + std::to_string(options.samples_per_step) +
                           "; expected 0 or more for each");
  if (options.redraw_interval.count() < 0 || options.line_interval.count() < 0)
    throw base::UsageError("ProgressBarOptions: redraw_interval is " + std::to_string(options.redraw_interval.count()) +
                           " ms and line_interval is " + std::to_string(options.line_interval.count()) +
                           " ms; expected 0 or more for each");
}

}  // namespace

std::string format_progress_line(const ProgressBarState& state, int columns) {
  std::vector<ProgressField> fields = make_fields(state);
  if (columns <= 0) {
    std::erase_if(fields, [](const ProgressField& field) { return field.drop_order == kBarDropOrder; });
    return join_fields(fields);
  }
  const auto available = static_cast<std::size_t>(columns - 1);  // some terminals wrap after the last column
  const auto less = [](const ProgressField& a, const ProgressField& b) { return a.drop_order < b.drop_order; };
  while (fields.size() > 1 && display_width(fields) > available)
    fields.erase(std::max_element(fields.begin(), fields.end(), less));
  const std::size_t spare = available - std::min(available, display_width(fields));
  for (ProgressField& field : fields)
    if (field.drop_order == kBarDropOrder)
      field.text = draw_bar(completed_fraction(state), std::min(kLongestBar, kShortestBar + spare));
  return join_fields(fields).substr(0, display_width(fields) > available ? available : std::string::npos);
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

ProgressBar::ProgressBar(int rank, const ProgressBarOptions& options)
    : options_(options),
      is_enabled_(rank == 0),
      steps_(options.steps_done),
      last_comm_ns_(options.comm ? base::telemetry::CommTime::total_ns() : 0),
      last_step_(Clock::now()),
      last_drawn_(last_step_) {
  require_valid_options(options);
  const base::Env& env = base::Env::this_process();
  if (is_enabled_ && terminal_columns(env) > 0)
    output_ = env.lockstep_terminal ? OutputKind::kLauncher : OutputKind::kTerminal;
}

ProgressBar::~ProgressBar() {
  if (!has_open_row_) return;
  has_open_row_ = false;
  if (options_.keep_last_line)
    write("\n", true);
  else if (output_ == OutputKind::kTerminal)
    write(kEraseRow, true);  // the launcher replaces the bar by the next one
}

bool ProgressBar::count_step() {
  if (!is_enabled_) return false;
  const Clock::time_point now = Clock::now();
  update_step_time(now, steps_++ % options_.steps_per_epoch == 0);
  const bool last_of_epoch = steps_ % options_.steps_per_epoch == 0;
  const std::chrono::milliseconds pause =
      output_ == OutputKind::kNone ? options_.line_interval : options_.redraw_interval;
  if (now - last_drawn_ < pause && !(last_of_epoch && options_.keep_last_line)) return false;
  last_drawn_ = now;
  return true;
}

void ProgressBar::update_step_time(Clock::time_point now, bool first_of_epoch) {
  const double seconds = std::chrono::duration<double>(now - last_step_).count();
  last_step_ = now;
  const std::int64_t comm_ns = options_.comm ? base::telemetry::CommTime::total_ns() : 0;
  const double comm_seconds = static_cast<double>(comm_ns - std::exchange(last_comm_ns_, comm_ns)) / 1e9;
  if (first_of_epoch) return;  // the interval includes evaluation, saving, or the start of the program
  const double weight = step_seconds_ < 0 ? 1 : kSmoothing;
  step_seconds_ += weight * (seconds - step_seconds_);
  comm_seconds_ += weight * (comm_seconds - comm_seconds_);
}

void ProgressBar::draw(const NamedValues& values) {
  const std::int64_t per_epoch = options_.steps_per_epoch;
  ProgressBarState state{.label = options_.label,
                         .epoch = (steps_ - 1) / per_epoch,
                         .num_epochs = options_.num_epochs,
                         .step = (steps_ - 1) % per_epoch + 1,
                         .num_steps = per_epoch,
                         .values = values};
  if (step_seconds_ > 0) {
    if (options_.samples_per_step > 0)
      state.samples_per_second = static_cast<double>(options_.samples_per_step) / step_seconds_;
    state.steps_per_second = 1 / step_seconds_;
    if (options_.comm) state.comm_fraction = std::clamp(comm_seconds_ / step_seconds_, 0.0, 1.0);
    state.seconds_left =
        step_seconds_ * static_cast<double>(std::max<std::int64_t>(0, options_.num_epochs * per_epoch - steps_));
  }
  // Queried each time, because the terminal may have been resized.
  std::string line =
      format_progress_line(state, output_ == OutputKind::kNone ? 0 : terminal_columns(base::Env::this_process()));
  const bool keep_last_line = output_ == OutputKind::kNone || (state.step == per_epoch && options_.keep_last_line);
  if (output_ == OutputKind::kTerminal) line.insert(0, kEraseRow);
  // The \r marks a bar for the launcher. On a terminal the cursor stays after the bar, so that output of other writers
  // does not overwrite it.
  line += keep_last_line ? "\n" : output_ == OutputKind::kLauncher ? "\r" : "";
  has_open_row_ = !keep_last_line;
  write(std::move(line), keep_last_line);
}

void ProgressBar::print_line(std::string_view line) {
  if (!is_enabled_) return;
  std::string text(line);
  if (output_ == OutputKind::kTerminal && has_open_row_) text.insert(0, kEraseRow);
  has_open_row_ = has_open_row_ && output_ == OutputKind::kLauncher;  // the launcher keeps the bar below
  write(text + "\n", true);
  last_drawn_ -= options_.redraw_interval;  // the next step draws
}

void ProgressBar::write(std::string text, bool wait_for_terminal) {
  std::fflush(stdout);
  base::set_progress_bar_active(output_ == OutputKind::kTerminal && has_open_row_);
  pollfd available{STDOUT_FILENO, POLLOUT, 0};
  if (::poll(&available, 1, wait_for_terminal ? kWriteTimeoutMs : 0) == 0) return;
  // A failed write cannot be reported anywhere.
  [[maybe_unused]] const auto written = ::write(STDOUT_FILENO, text.data(), text.size());
}

}  // namespace lockstep::training::inline report
