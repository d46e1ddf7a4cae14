"""The loss heads of language models: where they are, and the forward that never holds the logits."""
