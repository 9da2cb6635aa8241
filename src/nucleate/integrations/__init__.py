"""Adapters for other libraries. Each module needs the library that it is named after; nucleate itself needs none."""
