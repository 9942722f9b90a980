"""Who updates what: an optimizer in parts, and whether it may be cut."""
