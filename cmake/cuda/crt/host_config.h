// Of the CUDA toolkit's header of this name, the part that a C++ compiler needs. See host_defines.h.
#pragma once

#include "host_defines.h"
