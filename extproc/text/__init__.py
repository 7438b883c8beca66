"""Text for engines that speak tokens: tokenizers, chat templates, incremental detokenisation, stop strings.

Nothing of the libraries that do the work (``transformers``, ``tokenizers``, ``jinja2``) is imported before there is a
model that needs them: a fleet of HTTP workers does without.
"""
