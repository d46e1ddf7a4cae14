#include "ops/torch.h"

#include "ops/checks.h"

#include <ATen/EmptyTensor.h>

namespace ckptfused {

namespace {

size_t memory_of(const at::Tensor& t) {
  return t.storage().data() == nullptr ? 0 : t.storage().nbytes();
}

// As far as its sizes and strides reach.
size_t needed_by(const at::Tensor& t) {
  return at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(),
                                          size_t(t.storage_offset()));
}

}  // namespace

bool has_memory(const at::Tensor& t) {
  return t.numel() == 0 || t.is_meta() || memory_of(t) >= needed_by(t);
}

void check_memory(const char* op, const std::string& name, const at::Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided, op, ": ", name,
              ": expected a strided tensor, got layout ", t.layout());
  TORCH_CHECK(has_memory(t), op, ": ", name, ": expected ", needed_by(t), " bytes of memory for ",
              t.scalar_type(), " ", t.sizes(), ", got ", memory_of(t),
              ": the data is not allocated yet, or its storage was resized since it was saved");
}

}  // namespace ckptfused
