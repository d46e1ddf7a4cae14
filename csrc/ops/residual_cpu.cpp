#include "ops/torch.h"

#include "kernels/cpu/residual.h"
#include "ops/row_args.h"

namespace ckptfused {
namespace {

void residual_fwd(const at::Tensor& x, const at::Tensor& f, const OptionalTensor& rng_state,
                  const OptionalTensor& post_w, const OptionalTensor& post_b,
                  const OptionalTensor& next_w, const OptionalTensor& next_b,
                  const OptionalTensor& sum, const OptionalTensor& normed, c10::string_view post,
                  double post_eps, c10::string_view next, double next_eps, double m, double p,
                  int64_t site, at::IntArrayRef rows) {
  const char* op = "residual_fwd";
  TORCH_CHECK(x.dim() == 2, op, ": x: expected [N, C], got ", x.sizes());
  const int64_t n = x.size(0), cols = x.size(1);
  const at::ScalarType stream = x.scalar_type(), acc = acc_dtype(stream);
  check_tensor(op, "x", x, x.sizes(), stream, at::kCPU);
  check_dtype_pair(op, "f", f.scalar_type(), stream);
  check_tensor(op, "f", f, x.sizes(), f.scalar_type(), at::kCPU);
  check_tensor(op, "sum", sum, x.sizes(), stream, at::kCPU);

  ResidualFwd a{};
  a.cols = cols;
  a.r = kernel_dtype(op, "x", x);
  a.p = kernel_dtype(op, "f", f);
  a.x = x.const_data_ptr();
  a.f = f.const_data_ptr();
  a.post = norm_kind(op, post);
  a.post_eps = post_eps;
  const at::Tensor post_gain = norm_gain(op, "post_w", post_w, a.post, cols, acc, at::kCPU);
  const at::Tensor post_shift = norm_param(op, "post_b", post_b, cols, acc, at::kCPU);
  a.post_weight = post_gain.const_data_ptr();
  a.post_bias = const_data(post_shift);
  a.m = m;
  a.dropout = host_dropout(op, rng_state, p, site, cols);
  a.row_map = row_map(op, rows, n);
  a.sum = mutable_data(sum);
  a.next = norm_kind(op, next);
  a.next_eps = next_eps;
  const at::Tensor next_gain = norm_gain(op, "next_w", next_w, a.next, cols, acc, at::kCPU);
  const at::Tensor next_shift = norm_param(op, "next_b", next_b, cols, acc, at::kCPU);
  a.next_weight = next_gain.const_data_ptr();
  a.next_bias = const_data(next_shift);
  if (given(normed)) {
    const at::ScalarType dtype = normed->scalar_type();
    TORCH_CHECK(dtype == stream || dtype == f.scalar_type(), op, ": normed: expected ", stream,
                " or ", f.scalar_type(), ", got ", dtype);
    check_tensor(op, "normed", *normed, x.sizes(), dtype, at::kCPU);
    a.normed = normed->mutable_data_ptr();
    a.normed_dtype = kernel_dtype(op, "normed", *normed);
  }
  parallel_rows(n, cols, [&](int64_t begin, int64_t end) { residual_fwd_rows(a, begin, end); });
}

void residual_bwd(const at::Tensor& ds, const OptionalTensor& f, const OptionalTensor& rng_state,
                  const OptionalTensor& post_w, const at::Tensor& df, const OptionalTensor& dpost_w,
                  const OptionalTensor& dpost_b, c10::string_view post, double post_eps, double m,
                  double p, int64_t site, at::IntArrayRef rows) {
  const char* op = "residual_bwd";
  TORCH_CHECK(ds.dim() == 2, op, ": ds: expected [N, C], got ", ds.sizes());
  const int64_t n = ds.size(0), cols = ds.size(1);
  const at::ScalarType stream = ds.scalar_type(), acc = acc_dtype(stream);
  check_tensor(op, "ds", ds, ds.sizes(), stream, at::kCPU);
  check_dtype_pair(op, "df", df.scalar_type(), stream);
  check_tensor(op, "df", df, ds.sizes(), df.scalar_type(), at::kCPU);
  check_tensor(op, "f", f, ds.sizes(), df.scalar_type(), at::kCPU);
  check_tensor(op, "dpost_w", dpost_w, {cols}, acc, at::kCPU);
  check_tensor(op, "dpost_b", dpost_b, {cols}, acc, at::kCPU);

  ResidualBwd a{};
  a.cols = cols;
  a.r = kernel_dtype(op, "ds", ds);
  a.p = kernel_dtype(op, "df", df);
  a.ds = ds.const_data_ptr();
  a.f = const_data(f);
  a.post = norm_kind(op, post);
  TORCH_CHECK(a.post == NormKind::none || given(f), op,
              ": f: expected the post norm's input, got none");
  a.post_eps = post_eps;
  const at::Tensor gain = norm_gain(op, "post_w", post_w, a.post, cols, acc, at::kCPU);
  a.post_weight = gain.const_data_ptr();
  a.m = m;
  a.dropout = host_dropout(op, rng_state, p, site, cols);
  a.row_map = row_map(op, rows, n);
  a.df = df.mutable_data_ptr();
  parallel_rows_with_grads(n, cols, acc, dpost_w, dpost_b,
                           [&](int64_t begin, int64_t end, void* dweight, void* dbias) {
                             residual_bwd_rows(a, begin, end, dweight, dbias);
                           });
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("residual_fwd", &residual_fwd);
  m.impl("residual_bwd", &residual_bwd);
}

}  // namespace ckptfused
