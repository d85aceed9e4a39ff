"""Devices: slot files past the page cache, and the table that says what is in them."""
