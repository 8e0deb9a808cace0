"""How kernels are compiled, cached and run in threads."""
