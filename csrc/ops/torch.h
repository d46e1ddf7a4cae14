#ifndef CKPTFUSED_OPS_TORCH_H
#define CKPTFUSED_OPS_TORCH_H

// The one header through which ops/ and autograd/ see torch. setup.py precompiles it, so each file
// includes it first.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace ckptfused {

// t.narrow(dim, first, count), which is t itself where that is all of it: a view takes as long as a
// small kernel.
inline at::Tensor part_of(const at::Tensor& t, int64_t dim, int64_t first, int64_t count) {
  return first == 0 && count == t.size(dim) ? t : t.narrow(dim, first, count);
}

}  // namespace ckptfused

#endif
