"""What is done to other libraries while they run: attributes replaced, operations given other kernels."""
