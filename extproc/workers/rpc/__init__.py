"""Workers that are gRPC servers: which engine one is, how it is, what it is and how loaded.

The services are those of the PyPI package ``smg-grpc-proto`` (0.4.28), which the engines' servers are made from too.
"""
