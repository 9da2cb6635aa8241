"""Selection: take one token, and report log-probabilities."""
