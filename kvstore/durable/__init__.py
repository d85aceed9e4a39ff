"""The durable set: what deserves to last, and the way to the region's bucket and back."""
