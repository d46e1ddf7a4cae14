#pragma once

#include "kernels/sum_grads.h"
#include "ops/row_args.h"

// The gradients of norms' parameters: *_bwd leaves the sum of each chunk of rows, and sum_grads
// adds up those of several parameters at once.

namespace ckptfused {

template <void (*kRun)(const std::vector<GradSum>&, DType, const RowCall&)>
void sum_grads(at::TensorList partials, at::TensorList grads) {
  const char* op = "sum_grads";
  TORCH_CHECK(partials.size() == grads.size(), op, ": expected as many grads as partials, got ",
              grads.size(), " and ", partials.size());
  if (partials.empty()) return;
  const at::Device device = partials[0].device();
  const at::ScalarType acc = partials[0].scalar_type();
  TORCH_CHECK(acc == at::kFloat || acc == at::kDouble, op, ": partials[0]: expected Float or ",
              "Double, got ", acc);
  std::vector<GradSum> sums;
  for (size_t i = 0; i < partials.size(); ++i) {
    const at::Tensor &from = partials[i], &to = grads[i];
    TORCH_CHECK(from.dim() == 2 && to.dim() == 1, op, ": expected partials [chunks, C] and grads ",
                "[C], got ", from.sizes(), " and ", to.sizes());
    check_tensor(op, "partials", from, {from.size(0), to.size(0)}, acc, device);
    check_tensor(op, "grads", to, {to.size(0)}, to.scalar_type(), device);
    sums.push_back({from.const_data_ptr(), to.mutable_data_ptr(), from.size(0), to.size(0),
                    kernel_dtype(op, "grads", to)});
  }
  kRun(sums, kernel_dtype(op, "partials", partials[0]), {op, device, 1});
}

}  // namespace ckptfused
