"""NVIDIA GPUs: attention, captured steps, and forwards of generated kernels."""
