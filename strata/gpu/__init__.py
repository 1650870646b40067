"""GPU backend: one .cu per op beside its launcher, graphs, state on the device. Importing it needs no CuPy."""
