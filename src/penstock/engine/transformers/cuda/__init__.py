"""The CUDA runner: CUDA graphs, a KV cache in regions, and Triton kernels with a plain reference."""
