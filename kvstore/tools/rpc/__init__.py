"""The gRPC door: a process beside the daemon, a client of its socket."""
