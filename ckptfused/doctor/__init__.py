"""What is wrong with a model's activation checkpointing: by looking, and by proof."""

from ckptfused.doctor.api import doctor
from ckptfused.doctor.findings import Finding, Findings

__all__ = ["Finding", "Findings", "doctor"]
