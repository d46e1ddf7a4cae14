"""Say what is wrong with a model's activation checkpointing, and what could be better.

Of a configuration of Hugging Face's the language model is built without weights, and looked at. A function of yours
(module:factory) returns a model with weights, and a batch if it has one: then a training step as configured is
compared, bit for bit, with one that saves everything. Exit status 3: something is an error; 1: the
doctor could not run.
"""

from __future__ import annotations

import argparse

from ckptfused.cli.errors import NO
from ckptfused.cli.options import add_accumulation, add_model, add_step, model_and_batch, ran, whole_package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_step(parser)
    add_accumulation(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    model, batch = model_and_batch(arguments)
    steps = arguments.gradient_accumulation_steps
    found = ran(arguments, lambda: whole_package().doctor(model, batch, gradient_accumulation_steps=steps))
    print(found.to_json() if arguments.json else found)
    return 0 if found.healthy else NO
