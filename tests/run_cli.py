"""The command line as a script, for programs that start scripts."""

from lookahead_cli.app import main

main()
