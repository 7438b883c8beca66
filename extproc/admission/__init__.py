"""How much is taken on at once: requests of the gateway, legs of a worker, and who waits for either. Pure."""
