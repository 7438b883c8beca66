"""pd-extproc: an Envoy external processor that serves prefill/decode disaggregated LLM workers."""

import os

__version__ = "0.1.0"

# grpcio's fork handlers crash a child before it becomes another program while calls are under way (1.85: one of twenty
# under uvloop, whose subprocesses are forked): Envoy then "ended with status -11". Nothing here goes on after a fork.
# To be set before grpcio is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# Its core writes lines of its own to stderr, one for each TLS handshake that fails; what fails is told by its errors.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
