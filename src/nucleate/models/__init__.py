"""Models and model runners. The engine depends on the interfaces in ``protocol.py`` and ``runner.py`` only."""
