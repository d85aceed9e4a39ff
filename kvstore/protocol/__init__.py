"""What travels over a door: frames, and the words of their answers."""
