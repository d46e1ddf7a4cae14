#include "ops/torch.h"

#include "ops/checks.h"

#include <ATen/EmptyTensor.h>

namespace ckptfused {

void check_memory(const char* op, const std::string& name, const at::Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided, op, ": ", name,
              ": expected a strided tensor, got layout ", t.layout());
  if (t.numel() == 0 || t.is_meta()) return;
  const size_t needed = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(),
                                                         size_t(t.storage_offset()));
  const size_t there = t.storage().data() == nullptr ? 0 : t.storage().nbytes();
  TORCH_CHECK(there >= needed, op, ": ", name, ": expected ", needed, " bytes of memory for ",
              t.scalar_type(), " ", t.sizes(), ", got ", there,
              ": the data is not allocated yet, or its storage was resized since it was saved");
}

}  // namespace ckptfused
