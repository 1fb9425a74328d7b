"""Makes torchvision importable beside a CPU build of torch: for the development environment only.

There is no CPU wheel of torchvision. The ordinary one imports once the two operators that its missing
CUDA library would have declared are declared here, just before the first `import torchvision`.
`.ci/env` puts this file and a .pth line that imports it into the environment, so that every process
has it, vLLM's workers included.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(f"torchvision::{operator}", _SCHEMA)
        return None


sys.meta_path.insert(0, _DeclareOperators())
