"""Any pipeline on the CPU: evaluates the rules of the stages with NumPy on the top of the ranking.

See ``evaluation``.
"""
