"""One small adapter per model family."""

from ckptfused.convert.families import llama as llama
