"""The models, and how they are found. Everything above sees the two protocols of ``protocol.py`` only."""
