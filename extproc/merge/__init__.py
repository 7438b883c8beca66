"""Several answers made one: of samples, of the prompts of a list, of a decode and what its prefill knows of the prompt.

Without IO: bytes of worker answers in, bytes of the client's answer out. What "as one" means was taken from an
aggregated SGLang (docs/sglang-facts.md) and an aggregated vLLM 0.32. Values that need no change stay the raw bytes the
worker sent.
"""
