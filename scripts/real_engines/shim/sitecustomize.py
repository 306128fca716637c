"""Declares two operators of torchvision: its PyPI build, made for CUDA, fails to find them beside a CPU build of torch.

SGLang imports torchvision when it starts and calls neither operator for a text model. Python runs this file at its
start, since the folder is on PYTHONPATH.
"""

import importlib.util

if importlib.util.find_spec("torch") is not None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
