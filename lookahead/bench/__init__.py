"""Measuring what drafts bring: logged answers without a model, or every strategy and peer on a real one."""
