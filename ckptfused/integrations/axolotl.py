"""A plugin for axolotl's configuration."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from ckptfused.integrations.transformers import CkptfusedCallback


class CkptfusedArgs(BaseModel):
    """What a configuration says under `ckptfused:`, the arguments of `CkptfusedCallback`."""

    ckptfused: dict[str, Any] | None = None


class CkptfusedPlugin(BasePlugin):
    """Gives axolotl's trainer a `CkptfusedCallback`, where the configuration names this class under `plugins:`."""

    def get_input_args(self) -> str:
        """The class of what the configuration may say."""
        return f"{CkptfusedArgs.__module__}.{CkptfusedArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The callback."""
        return [CkptfusedCallback(**(cfg.ckptfused or {}))]
