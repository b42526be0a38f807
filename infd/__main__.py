"""`python -m infd` runs `infd`."""

from infd.cli import main

main()
