"""What a Ray cluster does: its connection, and tries that are built on it."""
