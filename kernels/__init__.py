"""Attention operators: Triton kernels, their PyTorch references, one public function."""
