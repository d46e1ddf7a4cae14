#pragma once

#include "ops/row_args.h"

// The norm ops on any device: checks, then kRun with the kernel's struct.

namespace ckptfused {

template <void (*kRun)(NormFwd, const RowCall&)>
void norm_fwd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
              const at::Tensor& y, c10::string_view kind, double eps) {
  const char* op = "norm_fwd";
  TORCH_CHECK(x.dim() == 2, op, ": x: expected [N, C], got ", x.sizes());
  const int64_t cols = x.size(1);
  const at::Device device = x.device();
  check_tensor(op, "x", x, x.sizes(), x.scalar_type(), device);
  check_dtype_pair(op, "y", y.scalar_type(), x.scalar_type());
  check_tensor(op, "y", y, x.sizes(), y.scalar_type(), device);

  NormFwd a{};
  a.kind = norm_kind(op, kind);
  a.eps = eps;
  a.cols = cols;
  a.r = kernel_dtype(op, "x", x);
  a.p = kernel_dtype(op, "y", y);
  a.x = x.const_data_ptr();
  a.weight = norm_param(op, "weight", weight, cols, device);
  a.bias = norm_param(op, "bias", bias, cols, device);
  a.y = y.mutable_data_ptr();
  kRun(a, {op, device, x.size(0)});
}

template <void (*kRun)(NormBwd, const RowCall&)>
void norm_bwd(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
              const OptionalTensor& dres, const OptionalTensor& dx, const OptionalTensor& dw,
              const OptionalTensor& db, c10::string_view kind, double eps) {
  const char* op = "norm_bwd";
  TORCH_CHECK(x.dim() == 2, op, ": x: expected [N, C], got ", x.sizes());
  const int64_t cols = x.size(1);
  const at::Device device = x.device();
  const at::ScalarType stream = x.scalar_type(), acc = acc_dtype(stream);
  check_tensor(op, "x", x, x.sizes(), stream, device);
  check_dtype_pair(op, "dy", dy.scalar_type(), stream);
  check_tensor(op, "dy", dy, x.sizes(), dy.scalar_type(), device);
  check_tensor(op, "dres", dres, x.sizes(), stream, device);
  check_tensor(op, "dx", dx, x.sizes(), stream, device);
  check_grads(op, "dw", dw, "db", db, cols, acc, device);

  NormBwd a{};
  a.kind = norm_kind(op, kind);
  a.eps = eps;
  a.cols = cols;
  a.r = kernel_dtype(op, "x", x);
  a.p = kernel_dtype(op, "dy", dy);
  a.dy = dy.const_data_ptr();
  a.x = x.const_data_ptr();
  a.weight = norm_param(op, "weight", weight, cols, device);
  a.dres = const_data(dres);
  a.dx = mutable_data(dx);
  kRun(a, {op, device, x.size(0), {}, dw, db});
}

}  // namespace ckptfused
