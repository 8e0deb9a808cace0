"""Corpora: rows of files to token documents."""
