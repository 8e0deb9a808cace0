"""The loop of lookahead decoding: requests, rows, steps, choosing tokens."""
