"""Declare operators that SGLang looks up when it is imported, and never calls on a CPU.

Two are torchvision's: its PyPI build, made for CUDA, does not find them beside a CPU build of torch. Four are
sgl_kernel's: without them, SGLang 0.5.23 has no image processor for Qwen-VL. Python runs this file at its start, since
its folder is on PYTHONPATH.
"""

import importlib.util

if importlib.util.find_spec("torch") is not None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kernels = torch.library.Library("sgl_kernel", "FRAGMENT")
    for operator in (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ):
        kernels.define(f"{operator}(Tensor unused) -> Tensor")
