"""x86 processors: packed weights, attention, and forwards as one native call."""
