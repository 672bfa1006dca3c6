// The layout of the --help texts: options in groups, lines of at most 100 columns, and an example for each group.
#pragma once

#include <map>
#include <string>

namespace CLI {
class App;
}

namespace lockstep::launcher {

/// The parts of a help text that the options do not hold.
struct HelpLayout {
  std::string usage;                            ///< the command line, after "usage: "
  std::map<std::string, std::string> examples;  ///< a command line for each group of options, by the group's name
};

/// Makes `app` print its help as the usage line, the description, the groups of options in the order of declaration,
/// each with its example, and the footer. Lines are broken between words; usage and examples are printed as they are.
void set_help_layout(CLI::App& app, HelpLayout layout);

}  // namespace lockstep::launcher
