"""Re-measures the cost model: CPU per request of Envoy and the sidecar, beside a plain proxy and the peer gateway.

``python -m bench`` runs everything; ``bench/README.md`` says what is measured and how.
"""
