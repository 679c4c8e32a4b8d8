"""Flash attention in Triton, for every NVIDIA GPU since Ampere."""
