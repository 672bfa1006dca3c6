// What a Python interpreter says about itself, torch and the packages that a script imports.
#pragma once

namespace lockstep::launcher::doctor {

/// A program for `python -c`, with the path of the user's script as its argument, or none. It prints one line of JSON:
///
///   python, prefix       the version and sys.prefix
///   environment          VIRTUAL_ENV or CONDA_PREFIX, if it is another one than prefix
///   torch, cuda, nccl    versions; or error, if torch cannot be imported
///   no_cuda              why torch.cuda.is_available() is false
///   packages             {name: version} of the packages that the script, and the modules beside it, import at the top
///                        of a file or a function; "" for one that is missing, "?" without a known version. An import
///                        in a try block may be missing.
///
/// It parses the script and does not run it.
extern const char* const kPythonFacts;

}  // namespace lockstep::launcher::doctor
