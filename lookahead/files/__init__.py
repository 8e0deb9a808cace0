"""Files that are written, kept and fetched."""
