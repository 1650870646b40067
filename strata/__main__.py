"""`python -m strata` is the command `strata`."""

from strata.cli import main

main()
