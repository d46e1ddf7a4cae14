"""One forward of a layer, call by call, and calls made again from it."""
