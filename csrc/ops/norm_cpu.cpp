#include "ops/torch.h"

#include "kernels/cpu/norm.h"
#include "ops/row_args.h"

namespace ckptfused {
namespace {

void norm_fwd(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
              const at::Tensor& y, c10::string_view kind, double eps) {
  const char* op = "norm_fwd";
  TORCH_CHECK(x.dim() == 2, op, ": x: expected [N, C], got ", x.sizes());
  const int64_t cols = x.size(1);
  const at::ScalarType acc = acc_dtype(x.scalar_type());
  check_tensor(op, "x", x, x.sizes(), x.scalar_type(), at::kCPU);
  check_dtype_pair(op, "y", y.scalar_type(), x.scalar_type());
  check_tensor(op, "y", y, x.sizes(), y.scalar_type(), at::kCPU);

  NormFwd a{};
  a.kind = norm_kind(op, kind);
  a.eps = eps;
  a.cols = cols;
  a.r = kernel_dtype(op, "x", x);
  a.p = kernel_dtype(op, "y", y);
  const at::Tensor gain = norm_gain(op, "weight", weight, a.kind, cols, acc, at::kCPU);
  const at::Tensor shift = norm_param(op, "bias", bias, cols, acc, at::kCPU);
  a.x = x.const_data_ptr();
  a.weight = gain.const_data_ptr();
  a.bias = const_data(shift);
  a.y = y.mutable_data_ptr();
  parallel_rows(x.size(0), cols, [&](int64_t begin, int64_t end) { norm_fwd_rows(a, begin, end); });
}

void norm_bwd(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
              const OptionalTensor& dres, const OptionalTensor& dx, const OptionalTensor& dw,
              const OptionalTensor& db, c10::string_view kind, double eps) {
  const char* op = "norm_bwd";
  TORCH_CHECK(x.dim() == 2, op, ": x: expected [N, C], got ", x.sizes());
  const int64_t cols = x.size(1);
  const at::ScalarType stream = x.scalar_type(), acc = acc_dtype(stream);
  check_tensor(op, "x", x, x.sizes(), stream, at::kCPU);
  check_dtype_pair(op, "dy", dy.scalar_type(), stream);
  check_tensor(op, "dy", dy, x.sizes(), dy.scalar_type(), at::kCPU);
  check_tensor(op, "dres", dres, x.sizes(), stream, at::kCPU);
  check_tensor(op, "dx", dx, x.sizes(), stream, at::kCPU);
  check_tensor(op, "dw", dw, {cols}, acc, at::kCPU);
  check_tensor(op, "db", db, {cols}, acc, at::kCPU);

  NormBwd a{};
  a.kind = norm_kind(op, kind);
  a.eps = eps;
  a.cols = cols;
  a.r = kernel_dtype(op, "x", x);
  a.p = kernel_dtype(op, "dy", dy);
  const at::Tensor gain = norm_gain(op, "weight", weight, a.kind, cols, acc, at::kCPU);
  a.dy = dy.const_data_ptr();
  a.x = x.const_data_ptr();
  a.weight = gain.const_data_ptr();
  a.dres = const_data(dres);
  a.dx = mutable_data(dx);
  parallel_rows_with_grads(x.size(0), cols, acc, dw, db,
                           [&](int64_t begin, int64_t end, void* dweight, void* dbias) {
                             norm_bwd_rows(a, begin, end, dweight, dbias);
                           });
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("norm_fwd", &norm_fwd);
  m.impl("norm_bwd", &norm_bwd);
}

}  // namespace ckptfused
