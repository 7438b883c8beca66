"""Bytes to streams: the ext_proc gRPC server and the egress client. Knows nothing of LLMs."""
