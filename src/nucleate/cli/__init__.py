"""The command line: one file per command. The only package that prints."""
