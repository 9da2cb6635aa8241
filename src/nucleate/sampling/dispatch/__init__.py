"""Selects the path that runs a pipeline, and gives the reason: ``route.dispatch``. Imports no backend's code."""
