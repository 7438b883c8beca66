"""Compares policies on simulated workers: ``python -m bench.simulate``; bench/README.md says what is modelled."""
