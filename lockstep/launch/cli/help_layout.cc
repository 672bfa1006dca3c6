#include "lockstep/launch/cli/help_layout.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <utility>

#include "lockstep/base/parse.h"

namespace lockstep::launcher::cli {
namespace {

constexpr std::size_t kMaxColumns = 100;
constexpr std::size_t kDescriptionColumn = 32;

/// Wraps `text` between words and keeps its newlines. Indents each line except the first by `indent` spaces.
std::string wrap(const std::string& text, std::size_t indent) {
  const std::string new_line = "\n" + std::string(indent, ' ');
  std::string wrapped;
  for (const std::string& line : base::split(text, '\n')) {
    if (!wrapped.empty()) wrapped += new_line;
    std::size_t column = indent;
    bool is_first = true;
    for (const std::string& word : base::split(line, ' ')) {
      if (!is_first && column + 1 + word.size() > kMaxColumns) {
        wrapped += new_line;
        column = indent;
      } else if (!is_first) {
        wrapped += ' ';
        ++column;
      }
      wrapped += word;
      column += word.size();
      is_first = false;
    }
  }
  return wrapped;
}

/// Returns "-n, --ranks N". A type that begins with "[=" follows the name without a space: "--pass-local-rank[=NAME]".
std::string name_and_type(const CLI::Option& option) {
  std::string text;
  for (const std::string& name : option.get_snames()) text += (text.empty() ? "-" : ", -") + name;
  for (const std::string& name : option.get_lnames()) text += (text.empty() ? "--" : ", --") + name;
  const std::string type = option.get_type_name();
  return text + (type.empty() || type.starts_with("[=") ? "" : " ") + type;
}

class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(HelpLayout layout) : layout_(std::move(layout)) {}

  std::string make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    std::string help = "usage: " + layout_.usage + "\n\n" + wrap(app->get_description(), 0) + "\n";
    for (const std::string& group : app->get_groups())
      if (!group.empty()) help += group_text(*app, group);  // options without a group are internal
    const std::string footer = app->get_footer();
    return footer.empty() ? help : help + "\n" + wrap(footer, 0) + "\n";
  }

 private:
  static std::string option_text(const CLI::Option& option) {
    const std::string head = "  " + name_and_type(option);
    const bool fits = head.size() + 2 <= kDescriptionColumn;
    return head + (fits ? "" : "\n") + std::string(kDescriptionColumn - (fits ? head.size() : 0), ' ') +
           wrap(option.get_description(), kDescriptionColumn) + "\n";
  }

  std::string group_text(const CLI::App& app, const std::string& group) const {
    std::string text = "\n" + group + ":\n";
    for (const CLI::Option* option :
         app.get_options([&](const CLI::Option* candidate) { return candidate->get_group() == group; }))
      text += option_text(*option);
    const auto example = layout_.examples.find(group);
    return example == layout_.examples.end() ? text : text + "  Example: " + example->second + "\n";
  }

  HelpLayout layout_;
};

}  // namespace

void set_help_layout(CLI::App& app, HelpLayout layout) {
  app.formatter(std::make_shared<HelpFormatter>(std::move(layout)));
}

}  // namespace lockstep::launcher::cli
