#pragma once

#include <string_view>

#include "kernels/activation.h"
#include "ops/checks.h"
#include "ops/row_args.h"

// The activation ops on any device: checks, then kRun with the kernel's struct.

namespace ckptfused {

// An activation of these ops alone: reglu, of which what dropout keeps is not scaled. With an open
// gate it is what dropout keeps of numbers, as they are.
constexpr std::string_view kKept = "kept";

// What forward and backward share; u is the up projection's part that the call covers.
ActivationShape activation_shape(const char* op, const at::Tensor& u, const OptionalTensor& state,
                                 std::string_view act, double p, int64_t site, int64_t cols,
                                 int64_t row0, int64_t col0, at::IntArrayRef rows,
                                 const OptionalTensor& coefficients);
// The memory of the sums of the coefficients' gradients, null where they are not asked for.
void* coefficient_sums_output(const char* op, const OptionalTensor& sums, const at::Tensor& u,
                              const ActivationShape& a);

// Tensors of u's shape, dtype and device, whose rows are contiguous.
Strided<const void*> activation_input(const char* op, const char* name, const at::Tensor& t,
                                      const at::Tensor& u);
Strided<void*> activation_output(const char* op, const char* name, const OptionalTensor& t,
                                 const at::Tensor& u);

template <void (*kRun)(ActivationFwd, const RowCall&)>
void activation_fwd(const at::Tensor& g, const at::Tensor& u, const OptionalTensor& rng_state,
                    const at::Tensor& h, c10::string_view act, double p, int64_t site, int64_t cols,
                    int64_t row0, int64_t col0, at::IntArrayRef rows,
                    const OptionalTensor& coefficients) {
  const char* op = "activation_fwd";
  ActivationFwd a{
      activation_shape(op, u, rng_state, act, p, site, cols, row0, col0, rows, coefficients)};
  a.u = activation_input(op, "u", u, u);
  a.g = a.gated ? activation_input(op, "g", g, u) : a.u;
  a.h = activation_output(op, "h", h, u);
  kRun(a, {op, u.device(), u.size(0), rng_state});
}

template <void (*kRun)(ActivationBwd, const RowCall&)>
void activation_bwd(const at::Tensor& g, const at::Tensor& u, const at::Tensor& dh,
                    const OptionalTensor& rng_state, const OptionalTensor& h,
                    const OptionalTensor& dg, const OptionalTensor& du, c10::string_view act,
                    double p, int64_t site, int64_t cols, int64_t row0, int64_t col0,
                    at::IntArrayRef rows, const OptionalTensor& coefficients,
                    const OptionalTensor& sums) {
  const char* op = "activation_bwd";
  ActivationBwd a{
      activation_shape(op, u, rng_state, act, p, site, cols, row0, col0, rows, coefficients)};
  TORCH_CHECK(a.gated || !given(dg), op, ": dg: expected none for ", act, ", which has no gate");
  a.u = activation_input(op, "u", u, u);
  a.g = a.gated ? activation_input(op, "g", g, u) : a.u;
  a.dh = activation_input(op, "dh", dh, u);
  a.h = activation_output(op, "h", h, u);
  a.dg = activation_output(op, "dg", dg, u);
  a.du = activation_output(op, "du", du, u);
  a.sums = coefficient_sums_output(op, sums, u, a);
  kRun(a, {op, u.device(), u.size(0), rng_state});
}

}  // namespace ckptfused
