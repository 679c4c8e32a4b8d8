"""Which part of a transformer each kernel of this package computes, by its name in a profiler's trace."""

_KERNELS = {
    "attention": (
        *("flash_fwd_kernel", "flash_dkdv_kernel", "flash_dq_kernel", "_delta_kernel"),
        *("hopper_fwd_kernel", "hopper_bwd_kernel", "_after_kernel", "_documents_kernel"),
        "_document_tiles_kernel",
        *("flash_decode_kernel", "hopper_decode_kernel"),
    ),
    "cross-entropy": ("cross_entropy_fwd_kernel", "cross_entropy_bwd_kernel", "cross_entropy_in_place_kernel"),
    "rotary": ("rotary_kernel",),
    "sampling": ("likeliest_kernel", "draw_few_kernel", "draw_any_kernel"),
    "memory copies": ("write_kvcache_kernel",),
    "matmul": ("skinny_linear_kernel", "one_row_linear_kernel"),
}
PART_OF_KERNEL = {kernel: part for part, kernels in _KERNELS.items() for kernel in kernels}
