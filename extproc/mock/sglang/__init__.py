"""The rules of an SGLang worker (as of 0.5.23), for the mock server."""
