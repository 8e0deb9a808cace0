"""Loading models, and finding out how they verify drafts."""
