#pragma once

#include "kernels/residual.h"
#include "ops/row_args.h"

// The residual ops on any device: checks, then kRun with the kernel's struct.

namespace ckptfused {

template <void (*kRun)(ResidualFwd, const RowCall&)>
void residual_fwd(const at::Tensor& x, const at::Tensor& f, const OptionalTensor& rng_state,
                  const OptionalTensor& post_w, const OptionalTensor& post_b,
                  const OptionalTensor& next_w, const OptionalTensor& next_b,
                  const OptionalTensor& sum, const OptionalTensor& normed, c10::string_view post,
                  double post_eps, c10::string_view next, double next_eps, double m, double p,
                  int64_t site, at::IntArrayRef rows) {
  const char* op = "residual_fwd";
  TORCH_CHECK(x.dim() == 2, op, ": x: expected [N, C], got ", x.sizes());
  const int64_t n = x.size(0), cols = x.size(1);
  const at::Device device = x.device();
  const at::ScalarType stream = x.scalar_type();
  check_tensor(op, "x", x, x.sizes(), stream, device);
  check_dtype_pair(op, "f", f.scalar_type(), stream);
  check_tensor(op, "f", f, x.sizes(), f.scalar_type(), device);
  check_tensor(op, "sum", sum, x.sizes(), stream, device);

  ResidualFwd a{};
  a.cols = cols;
  a.r = kernel_dtype(op, "x", x);
  a.p = kernel_dtype(op, "f", f);
  a.x = x.const_data_ptr();
  a.f = f.const_data_ptr();
  a.post = norm_kind(op, post);
  a.post_eps = post_eps;
  a.post_weight = norm_param(op, "post_w", post_w, cols, device);
  a.post_bias = norm_param(op, "post_b", post_b, cols, device);
  a.m = m;
  a.dropout = checked_dropout(op, rng_state, p, site, cols, device);
  a.row_map = row_map(op, rows, n);
  a.sum = mutable_data(sum);
  a.next = norm_kind(op, next);
  a.next_eps = next_eps;
  a.next_weight = norm_param(op, "next_w", next_w, cols, device);
  a.next_bias = norm_param(op, "next_b", next_b, cols, device);
  if (given(normed)) {
    const at::ScalarType dtype = normed->scalar_type();
    TORCH_CHECK(dtype == stream || dtype == f.scalar_type(), op, ": normed: expected ", stream,
                " or ", f.scalar_type(), ", got ", dtype);
    check_tensor(op, "normed", *normed, x.sizes(), dtype, device);
    a.normed = normed->mutable_data_ptr();
    a.normed_dtype = kernel_dtype(op, "normed", *normed);
  }
  kRun(a, {op, device, n, rng_state});
}

template <void (*kRun)(ResidualBwd, const RowCall&)>
void residual_bwd(const at::Tensor& ds, const OptionalTensor& f, const OptionalTensor& rng_state,
                  const OptionalTensor& post_w, const at::Tensor& df, const OptionalTensor& dpost_w,
                  const OptionalTensor& dpost_b, c10::string_view post, double post_eps, double m,
                  double p, int64_t site, at::IntArrayRef rows) {
  const char* op = "residual_bwd";
  TORCH_CHECK(ds.dim() == 2, op, ": ds: expected [N, C], got ", ds.sizes());
  const int64_t n = ds.size(0), cols = ds.size(1);
  const at::Device device = ds.device();
  const at::ScalarType stream = ds.scalar_type(), acc = acc_dtype(stream);
  check_tensor(op, "ds", ds, ds.sizes(), stream, device);
  check_dtype_pair(op, "df", df.scalar_type(), stream);
  check_tensor(op, "df", df, ds.sizes(), df.scalar_type(), device);
  check_tensor(op, "f", f, ds.sizes(), df.scalar_type(), device);
  check_grads(op, "dpost_w", dpost_w, "dpost_b", dpost_b, cols, acc, device);

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
  a.post_weight = norm_param(op, "post_w", post_w, cols, device);
  a.m = m;
  a.dropout = checked_dropout(op, rng_state, p, site, cols, device);
  a.row_map = row_map(op, rows, n);
  a.df = df.mutable_data_ptr();
  kRun(a, {op, device, n, rng_state, dpost_w, dpost_b});
}

}  // namespace ckptfused
