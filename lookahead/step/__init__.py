"""What stands before and behind a forward: trees of all rows laid side by side, and what each row emits."""
