"""Make `python -m infd` run the command `infd`."""

from infd.cli import main

main()
