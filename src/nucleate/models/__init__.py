"""The models, and how they are found. Everything above sees the two protocols of ``model.py`` only."""
