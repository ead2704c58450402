"""Windows by sockets."""
