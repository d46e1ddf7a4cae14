#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rng.h"

namespace ckptfused {
namespace {

__global__ void rng_state_kernel(PhiloxSource from, int64_t* state) {
  if (threadIdx.x != 0) return;
  state[0] = from.captured ? *from.seed_ptr : int64_t(from.seed);
  state[1] =
      from.captured ? *from.offset_ptr + int64_t(from.offset_intragraph) : int64_t(from.offset);
}

}  // namespace

const char* rng_state_cuda(const PhiloxSource& from, int64_t* state, void* stream) {
  return launch(rng_state_kernel, dim3(1), dim3(32), stream, from, state);
}

}  // namespace ckptfused
