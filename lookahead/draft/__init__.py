"""Drafting the next tokens: who proposes them (sources) and which ones are worth a forward (planner)."""
