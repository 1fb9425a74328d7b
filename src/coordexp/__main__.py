"""Run `python -m coordexp`, which is the same as `coordexp`."""

from coordexp.cli import main

main()
