"""Verifying drafts with the target model: loading, key/value cache, one step, and the loop."""
