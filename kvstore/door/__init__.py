"""Who may ask what, over which transport."""
