"""lm-evaluation-harness with our engine: its command line, with the model `lookahead`, is `python -m lookahead.harness`."""
