"""What must stay, what must go, and what is limited."""
