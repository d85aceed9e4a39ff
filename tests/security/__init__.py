"""Who comes in through a door, and what they may."""
