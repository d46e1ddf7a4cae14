"""From a layer to its op: where its parts are, what each of them is, and the one call that they make."""
