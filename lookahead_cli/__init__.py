"""The `lookahead` command. Commands parse, call one core function, print."""
