"""The web inspector: shows what every sampling stage does to the tokens of a completion."""
