"""Decides how many drafts pay: what a forward costs, and what its draft tokens are worth."""
