"""From draft trees to scores: packing, attention, key/value cache, slots."""
