"""The CPU backend, compiled by Numba. What imports ``compile`` is for the compiler: who draws has ``libraries``.

``special`` is the hand-tuned kernel for the pipeline of most requests, ``generic`` runs every other pipeline. What both
stand on is here: the decorators of the compiler (``compile``), vectors (``lanes``, ``simd``), the exponential in
float64 (``doubles``), noise, and rows as they lie in memory (``load``).
"""
