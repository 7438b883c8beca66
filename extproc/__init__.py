"""pd-extproc: an Envoy external processor that serves prefill/decode disaggregated LLM workers."""

__version__ = "0.1.0"
