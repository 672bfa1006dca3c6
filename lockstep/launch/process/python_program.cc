#include "lockstep/launch/process/python_program.h"

#include <algorithm>

#include "lockstep/base/error.h"
#include "lockstep/base/parse.h"
#include "lockstep/launch/process/program.h"
#include "lockstep/launch/process/spawn.h"

namespace lockstep::launcher::process {
namespace {

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

/// How many words an option of the interpreter has; 0 if it ends the options: -c and -m, also behind other letters.
std::size_t count_option_words(const std::string& word) {
  if (word == "--check-hash-based-pycs") return 2;
  if (word.starts_with("--")) return 1;
  for (std::size_t i = 1; i < word.size(); ++i) {
    if (word[i] == 'c' || word[i] == 'm') return 0;
    if (word[i] == 'W' || word[i] == 'X') return i + 1 == word.size() ? 2 : 1;  // the rest is its value
  }
  return 1;
}

// The package is not executed: it would look for the extension. Its other modules can be imported nevertheless.
constexpr const char* kBuildExtension =
    "import importlib.util, sys\n"
    "spec = importlib.util.find_spec('lockstep')\n"
    "if not (spec and spec.origin):\n"
    "    sys.exit('lockstep build: ' + sys.executable + ' has no package lockstep; install the wheel there, or name "
    "another Python with --python')\n"
    "sys.modules['lockstep'] = importlib.util.module_from_spec(spec)\n"
    "from lockstep import _extension_build\n"
    "_extension_build.main()\n";

}  // namespace

bool is_python(const std::string& program) { return program.substr(program.rfind('/') + 1).starts_with("python"); }

bool runs_python(const std::string& program) {
  if (is_python(program)) return true;
  return std::ranges::any_of(shebang_words(read_head(program, 255)), is_python);
}

std::optional<std::size_t> python_script_index(const std::vector<std::string>& command) {
  if (command.empty()) return std::nullopt;
  if (command[0].find('/') != std::string::npos && command[0].ends_with(".py")) return 0;
  if (!is_python(command[0])) return std::nullopt;
  for (std::size_t i = 1; i < command.size();) {
    const std::string& word = command[i];
    if (word.empty() || word == "-") return std::nullopt;
    if (word[0] != '-') return i;
    const std::size_t words = count_option_words(word);
    if (words == 0) return std::nullopt;
    i += words;
  }
  return std::nullopt;
}

std::string python_hook_folder() {
  try {
    const std::string prefix = folder_of(folder_of(executable_path()));
    for (const char* const place : {"/lib/lockstep", "/lib/python3*/*-packages"})
      if (const std::string folder = first_match(prefix, std::string(place) + "/" + kPythonHook); !folder.empty())
        return folder;
  } catch (const base::Error&) {
    // without the hook
  }
  return "";
}

bool has_installed_hook(const std::string& program) {
  return !first_match(folder_of(folder_of(program)), "/lib/python3*/*-packages/lockstep_hook.pth").empty();
}

void exec_extension_build(std::string python) {
  if (python.empty()) {
    python = folder_of(executable_path()) + "/python3";
    if (!is_executable(python)) python = "python3";
  }
  const Environment environment = current_environment();
  const std::string path = find_program(python, find_variable(environment, "PATH").value_or(kDefaultSearchPath));
  throw base::SystemError("cannot execute " + base::quoted(path, 256),
                          exec_program(path, {path, "-c", kBuildExtension}));
}

}  // namespace lockstep::launcher::process
