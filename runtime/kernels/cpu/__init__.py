"""The C++ operators of a CPU: how they are built, found and called."""
