"""Teach a vision-language model to detect objects by training on its own corrected answers.

`Detector` uses a trained model. Its parts are imported when it is first asked for, so that importing this package
stays cheap.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordexp.detect.detections import DetectedObject, Detections
    from coordexp.detect.detector import Detector

__version__ = version("coordexp")
__all__ = ["DetectedObject", "Detections", "Detector", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Detector":
        from coordexp.detect.detector import Detector

        return Detector
    if name in ("DetectedObject", "Detections"):
        from coordexp.detect import detections

        return getattr(detections, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
