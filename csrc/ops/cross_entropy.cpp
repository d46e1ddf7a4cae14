#include "ops/torch.h"

#include "ops/cross_entropy.h"

namespace ckptfused {

CrossEntropyShape cross_entropy_shape(const char* op, const at::Tensor& logits,
                                      const at::Tensor& target, const OptionalTensor& class_weight,
                                      const CrossEntropyOptions& options, int64_t col0) {
  TORCH_CHECK(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) <= 1), op,
              ": logits: expected [N, V] with contiguous rows, got ", logits.sizes(),
              " with strides ", logits.strides());
  check_memory(op, "logits", logits);
  const int64_t n = logits.size(0), cols = logits.size(1);
  TORCH_CHECK(0 <= col0 && col0 + cols <= options.classes, op, ": col0: expected 0 to ",
              options.classes - cols, ", got ", col0);
  check_tensor(op, "target", target, {n}, at::kLong, logits.device());
  check_tensor(op, "class_weight", class_weight, {options.classes + 1},
               acc_dtype(logits.scalar_type()), logits.device());
  CrossEntropyShape a{};
  a.dtype = kernel_dtype(op, "logits", logits);
  a.classes = options.classes;
  a.cols = cols;
  a.col0 = col0;
  a.stride = logits.stride(0);
  a.target = static_cast<const int64_t*>(target.const_data_ptr());
  a.ignore_index = options.ignore_index;
  a.class_weight = const_data(class_weight);
  a.scale = options.scale;
  a.softcap = options.softcap;
  a.smoothing = options.smoothing;
  a.smooth = options.smoothing / double(std::max<int64_t>(1, options.classes));
  a.z_loss = options.z_loss;
  return a;
}

}  // namespace ckptfused
