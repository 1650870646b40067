"""`python -m strata.cli` is the command `strata`."""

from strata.cli import main

main()
