"""The commands, a module each, and what is one command's alone."""
