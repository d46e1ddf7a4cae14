"""One small adapter per model family."""

from ckptfused.convert.families import bert as bert
from ckptfused.convert.families import gemma as gemma
from ckptfused.convert.families import gpt2 as gpt2
from ckptfused.convert.families import gpt_neox as gpt_neox
from ckptfused.convert.families import llama as llama
from ckptfused.convert.families import moe as moe
from ckptfused.convert.families import opt as opt
from ckptfused.convert.families import phi3 as phi3
from ckptfused.convert.families import t5 as t5
from ckptfused.convert.families import timm_vit as timm_vit
from ckptfused.convert.families import torch_nn as torch_nn
from ckptfused.convert.families import vit as vit
from ckptfused.convert.families import whisper as whisper
