"""A node from elsewhere, over gRPC: the client for other services."""
