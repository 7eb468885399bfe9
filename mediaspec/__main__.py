"""`python -m mediaspec` is the `mediaspec` command."""

from .cli import main

main()
