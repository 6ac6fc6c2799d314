"""Keys and values of chunks: address, buffer of a prompt, rotation, block mask."""
