"""`python -m infd`: the same as `infd`."""

from infd.cli import main

main()
