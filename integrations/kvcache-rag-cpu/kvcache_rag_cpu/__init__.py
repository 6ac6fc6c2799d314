"""What makes `kvcache-rag` sooner on x86 CPUs: packed weights, and kernels that are compiled.

Kernels are compiled while a wheel is built (`hatch_build.py`), where there is a C compiler; without
one, or on another CPU, torch multiplies.
"""
