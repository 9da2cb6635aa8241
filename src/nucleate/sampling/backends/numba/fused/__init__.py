"""One hand-tuned chain for nearly every request. Start at ``rows``, then ``chain`` and ``cuts``."""
