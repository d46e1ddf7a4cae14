#include "ops/torch.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <mutex>

#include "kernels/cuda/rng.h"
#include "ops/launch_cuda.h"

namespace ckptfused {
namespace {

// (seed, offset) of one block call, from torch's generator of the device: torch.manual_seed
// reproduces a run, and each call moves the generator's offset on. Under CUDA-graph capture the two
// are in device memory that every replay fills anew, so they are never read here.
at::Tensor rng_state(const at::Tensor& like, int64_t /*call_id*/,
                     const std::optional<at::Generator>& generator) {
  const CudaLaunch cuda({"rng_state", like.device(), 1});
  auto* source = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      generator, at::cuda::detail::getDefaultCUDAGenerator(like.device().index()));
  const at::Tensor state = at::empty({2}, like.options().dtype(at::kLong));
  at::PhiloxCudaState drawn;
  {
    std::lock_guard<std::mutex> lock(source->mutex_);
    drawn = source->philox_cuda_state(4);  // offsets are multiples of four
  }
  PhiloxSource from;
  from.captured = drawn.captured_;
  if (drawn.captured_) {
    from.seed_ptr = drawn.seed_.ptr;
    from.offset_ptr = drawn.offset_.ptr;
    from.offset_intragraph = drawn.offset_intragraph_;
  } else {
    from.seed = drawn.seed_.val;
    from.offset = drawn.offset_.val;
  }
  cuda.check(rng_state_cuda(from, state.mutable_data_ptr<int64_t>(), cuda.stream()));
  return state;
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("rng_state", &rng_state);
}

}  // namespace ckptfused
