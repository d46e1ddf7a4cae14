"""One small adapter per model family."""

from ckptfused.models.families import bert as bert
from ckptfused.models.families import gemma as gemma
from ckptfused.models.families import gpt2 as gpt2
from ckptfused.models.families import llama as llama
from ckptfused.models.families import moe as moe
from ckptfused.models.families import phi3 as phi3
from ckptfused.models.families import t5 as t5
from ckptfused.models.families import timm_vit as timm_vit
from ckptfused.models.families import torch_nn as torch_nn
from ckptfused.models.families import whisper as whisper
