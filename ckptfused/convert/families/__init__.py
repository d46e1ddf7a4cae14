"""One small adapter per model family."""

from ckptfused.convert.families import gemma as gemma
from ckptfused.convert.families import gpt2 as gpt2
from ckptfused.convert.families import gpt_neox as gpt_neox
from ckptfused.convert.families import llama as llama
from ckptfused.convert.families import opt as opt
from ckptfused.convert.families import phi3 as phi3
