"""Declared parameters: validation, errors, and values in their canonical types."""
