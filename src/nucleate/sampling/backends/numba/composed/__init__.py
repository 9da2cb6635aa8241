"""Any pipeline on the CPU: the stages' own rules, evaluated by NumPy on the top of the ranking. See ``run``."""
