"""Engines and their habits. Imports nothing of ours but `kvstore.client`."""
