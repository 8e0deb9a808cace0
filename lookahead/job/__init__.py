"""Offline jobs: rows in, one output line per row, in the formats users' scripts rely on."""
