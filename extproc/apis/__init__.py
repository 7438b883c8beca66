"""The public endpoints: which paths there are, what their bodies must hold, how bodies are read and edited."""
