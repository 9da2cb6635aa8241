"""Watermarks in sampled text, and their detectors. See docs/watermarks.md."""

from __future__ import annotations

from nucleate.sampling.stages.watermarks.gumbel_watermark import GumbelWatermark
from nucleate.sampling.stages.watermarks.kgw import Kgw
from nucleate.sampling.stages.watermarks.synthid import SynthId
from nucleate.sampling.watermark_key import WatermarkKey
from nucleate.watermark.detection import Detection, detect
from nucleate.watermark.kinds import KINDS, read_watermark, with_watermark

__all__ = [
    "KINDS",
    "Detection",
    "GumbelWatermark",
    "Kgw",
    "SynthId",
    "WatermarkKey",
    "detect",
    "read_watermark",
    "with_watermark",
]
