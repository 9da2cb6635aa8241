"""Selects the path that runs a pipeline, and gives the reason: ``select.dispatch``. Imports no backend's code."""
