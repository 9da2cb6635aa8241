"""Temperature-like transforms of the scores."""
