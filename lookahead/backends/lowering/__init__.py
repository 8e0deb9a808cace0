"""From a model's forward to a plan of it: what programs of all backends are made of. Knows no backend."""
