"""The gRPC reply of one sequence made the answer that the client asked for, as it streams. Pure, no IO.

Chat Completions and Completions answer as vLLM's own server does, ``/generate`` as SGLang's, whatever the engine.
Several sequences are one answer by :mod:`extproc.merge`.
"""
