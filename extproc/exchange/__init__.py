"""One request from its first byte to its last."""
