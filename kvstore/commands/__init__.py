"""What operators ask of the engine: rules, clearing, erasing, and what is said of them."""
