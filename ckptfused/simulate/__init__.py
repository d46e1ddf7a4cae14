"""Any model on meta tensors for a named device: bytes and seconds without running it."""
