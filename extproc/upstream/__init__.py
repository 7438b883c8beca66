"""The service's own connections to workers, or to a proxy: legs that do not go by Envoy's egress listener."""
