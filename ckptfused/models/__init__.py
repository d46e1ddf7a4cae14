"""Existing models: finding their layers, deciding what each keeps, and the `forward` that each gets."""
