"""Checkpointing of any function: its arguments, what it reads beside them, and its replay."""
