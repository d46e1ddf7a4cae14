"""The report of a conversion: what each layer is and the bytes that it saves."""
