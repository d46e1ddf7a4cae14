// A norm by itself: its result, and from its input alone its gradients.
#include "ops/torch.h"

#include "autograd/function.h"
#include "block/ops.h"

namespace ckptfused {
namespace {

using at::Tensor;
using call::OptTensor;

Tensor rows_of(const Tensor& t) {
  return t.contiguous().view({-1, t.size(-1)});
}

// A parameter as kernels read it; a saved-tensor hook may have changed its strides.
Tensor operand(const OptTensor& param) {
  return param.has_value() ? param->contiguous() : Tensor();
}

Tensor norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, std::string_view kind,
            double eps) {
  const OpGuard guard(x);
  const Tensor y = at::empty(x.sizes(), x.options());
  call::norm_fwd(rows_of(x), operand(weight), operand(bias), y.view({-1, x.size(-1)}), kind, eps);
  return y;
}

// Of those of x, weight and bias that are asked for.
std::vector<Tensor> norm_grads(const Tensor& dy, const Tensor& x, const OptTensor& weight,
                               const OptTensor& bias, std::string_view kind, double eps,
                               const c10::List<bool>& needs) {
  const OpGuard guard(x);
  const Tensor in = rows_of(x);
  const int64_t rows = in.size(0), width = in.size(1);
  const at::ScalarType acc = acc_dtype(x.scalar_type());
  std::vector<Tensor> grads, partials, sums;
  Tensor partial[2];
  if (needs.get(0)) grads.push_back(at::empty(x.sizes(), x.options()));
  for (int i = 0; i < 2; ++i) {
    if (!needs.get(1 + i)) continue;
    const Tensor& param = i == 0 ? *weight : *bias;
    partial[i] = at::empty({call::grad_chunks(in, rows, width, 0), width}, x.options().dtype(acc));
    partials.push_back(partial[i]);
    sums.push_back(at::empty(param.sizes(), param.options()));
  }
  call::norm_bwd(rows_of(dy), in, operand(weight), Tensor(),
                 needs.get(0) ? grads[0].view({rows, width}) : Tensor(), partial[0], partial[1],
                 kind, eps);
  if (!partials.empty()) call::sum_grads(partials, sums);
  grads.insert(grads.end(), sums.begin(), sums.end());
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("norm", TORCH_FN(norm));
  m.impl("norm_grads", TORCH_FN(norm_grads));
}
TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("norm", TORCH_FN(norm));
  m.impl("norm_grads", TORCH_FN(norm_grads));
}

}  // namespace ckptfused
