"""The CPU backend, compiled by Numba. Imported only when it is used, because that alone takes half a second.

``special`` is one hand-tuned chain for nearly every request, ``staged`` compiles any pipeline stage by stage. What both
stand on is here: the compiler and its cache (``compile``), vectors (``simd``, ``weights``, ``squeeze``), float64
(``doubles``), noise, and rows as they lie in memory (``load``).
"""
