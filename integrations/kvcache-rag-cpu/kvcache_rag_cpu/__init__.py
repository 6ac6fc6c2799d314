"""Speed up `kvcache-rag` on x86 CPUs with packed weights and compiled kernels.

Kernels are compiled while a wheel is built (`hatch_build.py`), if there is a C compiler; without
one, or on another CPU, torch multiplies.
"""
