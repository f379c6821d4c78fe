"""`python -m lychee_local` is the `lychee` command."""

from lychee_local.cli import main

main()
