"""What a client asks of engines that take token ids: read from its JSON, said in terms that no engine owns. Pure."""
