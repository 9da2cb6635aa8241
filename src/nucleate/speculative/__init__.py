"""Speculative decoding: draft methods, acceptance rules, adaptive speculation length."""
