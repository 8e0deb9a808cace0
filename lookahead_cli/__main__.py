"""`python -m lookahead_cli` is the command `lookahead`."""

from lookahead_cli.app import main

main()
