"""Several answers made one: the samples of ``n > 1``, and a decode's answer with its prefill's prompt logprobs.

Without IO: bytes of worker answers in, bytes of the client's answer out. What "as one" means was taken from an
aggregated SGLang (docs/sglang-facts.md). Values that need no change stay the raw bytes the worker sent.
"""
