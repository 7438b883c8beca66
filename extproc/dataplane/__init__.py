"""Envoy: its bootstrap, its endpoints over ADS, its process."""
