"""The list of checks: each a function of a `Look`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptfused.doctor import checkpoints, coverage, memory, training
from ckptfused.doctor.findings import Finding
from ckptfused.doctor.look import Look

CHECKS: tuple[Callable[[Look], Iterator[Finding]], ...] = (
    checkpoints.reentrant_with_frozen_inputs,
    checkpoints.random_states_left_out,
    checkpoints.writes_in_place,
    checkpoints.statistics_twice,
    checkpoints.replayed_twice,
    checkpoints.undone_by_the_compiler,
    coverage.ranks_differ,
    coverage.uncovered_layers,
    training.cache_in_training,
    training.checkpoint_in_eval,
    training.nothing_trained,
    training.misspelt_key,
    training.materialised_attention,
    training.single_precision,
    memory.memory_of_the_step,
)
