"""How many drafts pay: what a forward costs, and what its guesses are worth."""
