"""The trie of seen text: sorted suffixes in a mapped file, and the small mutable store of the running job."""
