"""Whether a bucket has what its feed says, and what becomes of the rest."""
