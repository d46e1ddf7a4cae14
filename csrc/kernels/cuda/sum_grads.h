#pragma once

#include <cstdint>

#include "kernels/sum_grads.h"

namespace ckptfused {

// Sums that one launch makes.
constexpr int64_t kMostGradSums = 16;

// The first count of sums, at most kMostGradSums, from partial sums of type acc (f64 or f32).
// Returns null, or what went wrong. stream: a cudaStream_t.
const char* sum_grads_cuda(const GradSum* sums, int64_t count, DType acc, void* stream);

}  // namespace ckptfused
