"""Models and model runners. The engine depends on the interfaces in ``protocol.py`` and ``runner.py`` only."""

BUNDLED_MODEL = "nucleate-tiny"
"""The name of the embedded model in requests."""
