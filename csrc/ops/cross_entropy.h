#pragma once

#include <string_view>

#include "kernels/cross_entropy.h"
#include "ops/row_args.h"

// The cross-entropy ops on any device: checks, then kRun with the kernel's struct.

namespace ckptfused {

// How a loss is made of logits: what forward and backward share.
struct CrossEntropyOptions {
  int64_t ignore_index;
  double smoothing, scale, softcap, z_loss;
  int64_t classes;  // V
};

// logits: [N, cols], its rows contiguous, the classes from col0 on; target: [N]; class_weight: acc
// [V + 1], the last one their sum, or absent.
CrossEntropyShape cross_entropy_shape(const char* op, const at::Tensor& logits,
                                      const at::Tensor& target, const OptionalTensor& class_weight,
                                      const CrossEntropyOptions& options, int64_t col0);

template <void (*kRun)(CrossEntropyFwd, const RowCall&)>
void cross_entropy_fwd(const at::Tensor& logits, const at::Tensor& target,
                       const OptionalTensor& class_weight, const at::Tensor& loss,
                       const at::Tensor& lse, const OptionalTensor& predicted, bool grad,
                       int64_t ignore_index, double smoothing, double scale, double softcap,
                       double z_loss) {
  const char* op = "cross_entropy_fwd";
  CrossEntropyFwd a{
      cross_entropy_shape(op, logits, target, class_weight,
                          {ignore_index, smoothing, scale, softcap, z_loss, logits.size(-1)}, 0)};
  const at::Device device = logits.device();
  const at::ScalarType acc = acc_dtype(logits.scalar_type());
  const int64_t n = logits.size(0);
  check_tensor(op, "loss", loss, {n}, acc, device);
  check_tensor(op, "lse", lse, {n}, acc, device);
  check_tensor(op, "predicted", predicted, {n}, at::kLong, device);
  a.logits = logits.mutable_data_ptr();
  a.loss = loss.mutable_data_ptr();
  a.lse = lse.mutable_data_ptr();
  a.predicted = static_cast<int64_t*>(mutable_data(predicted));
  a.grad = grad;
  kRun(a, {op, device, n});
}

template <void (*kRun)(CrossEntropyBwd, const RowCall&)>
void cross_entropy_bwd(const at::Tensor& logits, const at::Tensor& target,
                       const OptionalTensor& class_weight, const at::Tensor& lse,
                       const OptionalTensor& factor, int64_t classes, int64_t col0,
                       int64_t ignore_index, double smoothing, double scale, double softcap,
                       double z_loss) {
  const char* op = "cross_entropy_bwd";
  CrossEntropyBwd a{cross_entropy_shape(op, logits, target, class_weight,
                                        {ignore_index, smoothing, scale, softcap, z_loss, classes},
                                        col0)};
  const at::Device device = logits.device();
  const at::ScalarType acc = acc_dtype(logits.scalar_type());
  const int64_t n = logits.size(0);
  check_tensor(op, "lse", lse, {n}, acc, device);
  check_tensor(op, "factor", factor, {n}, acc, device);
  a.logits = logits.mutable_data_ptr();
  a.lse = lse.const_data_ptr();
  a.factor = const_data(factor);
  kRun(a, {op, device, n});
}

}  // namespace ckptfused
