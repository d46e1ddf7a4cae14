#include "ops/torch.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

namespace ckptfused {
namespace {

// (seed, offset) of one block call: the seed is one 64-bit draw from torch's generator, so that
// torch.manual_seed reproduces a run. The call_id only keeps compilers from merging two calls.
at::Tensor rng_state(const at::Tensor& like, int64_t /*call_id*/,
                     const std::optional<at::Generator>& generator) {
  auto* source = at::get_generator_or_default<at::CPUGeneratorImpl>(
      generator, at::detail::getDefaultCPUGenerator());
  at::Tensor state = at::empty({2}, like.options().dtype(at::kLong));
  int64_t* words = state.mutable_data_ptr<int64_t>();
  {
    std::lock_guard<std::mutex> lock(source->mutex_);
    words[0] = int64_t(source->random64());
  }
  words[1] = 0;
  return state;
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("rng_state", &rng_state);
}

}  // namespace ckptfused
