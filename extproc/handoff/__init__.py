"""One module per KV-transfer protocol: how the two legs find each other. Pure functions and small state, no IO."""
