// The command `lockstep plan`: runs a program for some steps on this host and predicts its steps on several.
#pragma once

#include "lockstep/launch/cli/command_line.h"

namespace lockstep::launcher::predict {

/// Runs the program with `lockstep run` until it has made the steps, in a temporary folder with links to what is in the
/// current one, and prints what a step would take on the clusters of the options. Blocks for as long. Returns 0; or the
/// exit code of the program, with its last lines on stderr. Throws Error if the program made no steps that can be read.
int plan(const cli::PlanOptions& options);

}  // namespace lockstep::launcher::predict
