"""What `make gpu` runs on a machine with a GPU; benchmarks/GPU.md says in which order to call it on a rented one."""
