"""Drafts inside engines that are not ours."""
