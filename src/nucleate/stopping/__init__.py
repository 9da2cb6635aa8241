"""Stop criteria: token ids, strings, regular expressions, JSON."""
