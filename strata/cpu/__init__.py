"""CPU backend: intrinsics on addresses, worker pool, step walker and one file per op. Importing it compiles nothing."""
