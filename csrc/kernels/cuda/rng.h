#pragma once

#include <cstdint>

namespace ckptfused {

// Where a CUDA generator's state is (at::PhiloxCudaState without torch): in this struct, or, while
// a CUDA graph is being captured, in device memory that each replay fills anew.
struct PhiloxSource {
  bool captured = false;
  uint64_t seed = 0, offset = 0;        // not captured
  const int64_t* seed_ptr = nullptr;    // captured
  const int64_t* offset_ptr = nullptr;  // captured; the call's offset is offset_intragraph further
  uint64_t offset_intragraph = 0;
};

// state[0], state[1] = seed, offset, on the device. Returns null, or what went wrong. stream: a
// cudaStream_t.
const char* rng_state_cuda(const PhiloxSource& from, int64_t* state, void* stream);

}  // namespace ckptfused
