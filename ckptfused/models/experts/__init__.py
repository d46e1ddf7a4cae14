"""Experts of Hugging Face's mixtures as one op: which modules these are, what they compute, how a layer calls them."""
