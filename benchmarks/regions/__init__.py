"""Three regions on one machine, and what a new cluster in another region gains from them: `make demo-regions`."""
