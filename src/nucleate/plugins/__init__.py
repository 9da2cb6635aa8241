"""User-defined stages: registration, and loading from modules and installed packages."""
