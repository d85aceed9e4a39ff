"""The one object that doors talk to."""
