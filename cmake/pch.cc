// Precompiled headers belong to this file.
