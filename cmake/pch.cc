// The precompiled header of all torch rooms belongs to this file.
