// The layout of the --help texts: options in groups, lines of at most 100 columns, and an example for each group.
#pragma once

#include <map>
#include <string>

namespace CLI {
class App;
}

namespace lockstep::launcher::cli {

/// The parts of a help text that CLI11 does not store with the options.
struct HelpLayout {
  std::string usage;                            ///< the command line, after "usage: "
  std::map<std::string, std::string> examples;  ///< a command line for each group of options, by the group's name
};

/// Sets the layout of the help text of `app`: the usage line, the description, the groups of options in the order of
/// their declaration, each with its example, and the footer. Long lines are broken between words, except in the usage
/// and the examples.
void set_help_layout(CLI::App& app, HelpLayout layout);

}  // namespace lockstep::launcher::cli
