"""Records and rules everyone may hold: errors, geometry, programs, canonical arithmetic. Imports nothing of strata."""
