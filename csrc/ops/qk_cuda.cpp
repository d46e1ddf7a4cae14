#include "ops/torch.h"

#include "kernels/cuda/qk.h"
#include "ops/launch_cuda.h"
#include "ops/qk.h"

namespace ckptfused {
namespace {

void run_fwd(const QkPartList<QkFwd>& list) {
  const CudaLaunch cuda(list[0].call);
  QkParts<QkFwd> parts;
  for (const auto& part : list) parts.part[parts.count++] = part.heads;
  cuda.check(qk_fwd_cuda(parts, list[0].call.rows, cuda.stream()));
}

void run_bwd(const QkPartList<QkBwd>& list) {
  const CudaLaunch cuda(list[0].call);
  QkParts<QkBwd> parts;
  QkGrads grads[3];
  for (const auto& [heads, call] : list) {
    grads[parts.count] = {mutable_data(call.dweight), mutable_data(call.dbias), call.chunks(1)};
    parts.part[parts.count++] = heads;
  }
  cuda.check(qk_bwd_cuda(parts, grads, list[0].call.rows, cuda.stream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("qk_fwd", &qk_fwd<run_fwd>);
  m.impl("qk_bwd", &qk_bwd<run_bwd>);
}

}  // namespace ckptfused
