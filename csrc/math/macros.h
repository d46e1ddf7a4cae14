#pragma once

// Maths that runs on host and device alike is written once, under CKPT_HD. It is always inlined,
// so that on the host it takes the instruction set of the kernel that calls it.
#if defined(__CUDACC__)
#define CKPT_HD __host__ __device__ __forceinline__
#else
#define CKPT_HD inline __attribute__((always_inline))
#endif

// Whether what the device computes in another way than the host is compiled: for the device, and
// on the host for tests of just that.
#if defined(__CUDA_ARCH__) || defined(CKPTFUSED_DEVICE_BRANCHES)
#define CKPT_DEVICE 1
#else
#define CKPT_DEVICE 0
#endif
