// CMake compiles the precompiled header with the options of this source.
