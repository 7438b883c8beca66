"""One module per engine that is spoken to in gRPC: its requests, its answers, its aborts. Pure, no IO."""
