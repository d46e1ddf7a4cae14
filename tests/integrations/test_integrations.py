"""Libraries are imported when their callback is asked for, and not before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ckptfused import integrations
from tests import forks

pytestmark = pytest.mark.once
PROGRAM = """
import sys
import ckptfused, ckptfused.integrations
from tests import forks
for library in ("transformers", "lightning", "pytorch_lightning", "axolotl", "trl"):
    assert library not in sys.modules, library
"""


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    assert forks.python(PROGRAM).returncode == 0


def test_what_there_is() -> None:
    for name in integrations.__all__:
        assert name in integrations._LIBRARY
    with pytest.raises(AttributeError, match="has no attribute 'Callback'"):
        integrations.Callback  # noqa: B018


def test_the_plugin_of_axolotl() -> None:
    """By its own manager, as a configuration names it. Axolotl is no part of the test group: skipped without it."""
    base = pytest.importorskip("axolotl.integrations.base")
    manager = base.PluginManager.get_instance()
    manager.register("ckptfused.integrations.CkptfusedPlugin")
    assert "ckptfused.integrations.axolotl.CkptfusedArgs" in manager.get_input_args()
    for said, every in ((None, 100), ({"every": 7, "budget": "2GiB"}, 7)):
        (callback,) = manager.add_callbacks_pre_trainer(SimpleNamespace(ckptfused=said), None)
        assert isinstance(callback, integrations.CkptfusedCallback) and callback.run.every == every
        assert callback.run.options == ({} if said is None else {"budget": "2GiB"})
