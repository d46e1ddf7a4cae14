"""Fused FFN products with their activation, in Triton."""
