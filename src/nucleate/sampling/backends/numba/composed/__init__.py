"""Any pipeline on the CPU: evaluates stage rules with NumPy on the top of the ranking. See ``evaluation``."""
