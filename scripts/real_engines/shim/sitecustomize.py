"""Declares operators that SGLang looks up as it is imported, and never calls on a CPU.

Two of torchvision: its PyPI build, made for CUDA, fails to find them beside a CPU build of torch. Four of sgl_kernel,
without which SGLang 0.5.23 has no processor of images for Qwen-VL. Python runs this file at its start, since the folder
is on PYTHONPATH.
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
