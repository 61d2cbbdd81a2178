"""The CUDA runner: CUDA graphs, a regional KV cache and Triton kernels with their plain-torch reference."""
