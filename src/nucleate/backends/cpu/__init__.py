"""The CPU backend, compiled by Numba. Imported only when it is used, because that alone takes half a second."""
