"""The words every other package speaks: stages, rows, names for maths, noise, requests, events. NumPy only."""
