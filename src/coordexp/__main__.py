"""`python -m coordexp`, the same as `coordexp`."""

from coordexp.cli import main

main()
