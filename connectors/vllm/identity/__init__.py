"""What decides the KV of an engine, by content: its configuration, files, adapters, images."""
