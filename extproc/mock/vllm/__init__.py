"""The vLLM mock: version 0.32's HTTP, and its NIXL and Mooncake hand-offs."""
