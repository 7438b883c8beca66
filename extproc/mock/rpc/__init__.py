"""Mock workers that are gRPC servers, from the engines' own protos (``smg-grpc-proto``)."""
