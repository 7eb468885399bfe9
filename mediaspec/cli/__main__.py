"""`python -m mediaspec.cli` is the `mediaspec` command."""

from . import main

main()
