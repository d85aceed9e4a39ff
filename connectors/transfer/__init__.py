"""Copies between an engine and the daemon, whatever the engine."""
