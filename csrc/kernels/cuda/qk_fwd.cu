#include "kernels/cuda/qk.cuh"
#include "kernels/cuda/qk.h"
#include "kernels/cuda/types.cuh"

namespace ckptfused {
namespace {

constexpr int kSteps = 4;  // items that a team takes one after the other

template <typename T, bool kNorm>
__global__ void __launch_bounds__(kQkThreads, sizeof(T) == 8 ? 1 : 4)
    qk_fwd_kernel(QkFwd a, QkGrid grid) {
  using A = acc_t<T>;
  constexpr int kAtOnce = kHeadsAtOnce<T, kNorm>;
  const HeadUnit unit = head_unit(a, int(threadIdx.x) % grid.lanes);
  const A inverse_dim = A(1) / A(a.head_dim);
  A weight[kUnit], bias[kUnit];
  if constexpr (kNorm) {
    load_unit_gain(a, unit, weight);
    load_unit_shift(a.bias, unit, bias);
  }
  int64_t index = int64_t(blockIdx.x) * grid.chunk + int(threadIdx.x) / grid.lanes;
  QkCursor cursor(a, grid, index);
  CKPT_NO_UNROLL
  for (int64_t done = 0; done < grid.chunk; done += grid.teams()) {
    const int64_t head = cursor.item * kAtOnce;
    const int64_t heads = index < grid.items ? a.heads - head : 0;
    RawUnit<T> raw[kAtOnce];
    CKPT_UNROLL
    for (int h = 0; h < kAtOnce; ++h) {
      raw[h].load(head_at<const T>(a.x, cursor, head + h), unit, h < heads, grid.vectors);
    }
    RawAngles<A> angles;
    angles.load(a, grid, unit, cursor, heads > 0);
    const Rotation<A> rotation(angles, A(1));
    CKPT_UNROLL
    for (int h = 0; h < kAtOnce; ++h) {
      A v[kUnit];
      raw[h].unpack(v);
      if constexpr (kNorm) {
        const NormStats<A> stats = head_stats(a, grid, unit, inverse_dim, v);
        CKPT_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          v[i] = std::fma(normalised(v[i], stats), weight[i], bias[i]);
        }
      }
      rotation.apply(a, unit, v);
      store_unit(v, unit, h < heads, grid.vectors, head_at<T>(a.y, cursor, head + h));
    }
    index += grid.teams();
    cursor.step(a, grid);
  }
}

template <typename T, bool kNorm>
const char* qk_fwd_launch(const QkFwd& a, int64_t tokens, void* stream) {
  QkGrid grid;
  if (!set_qk_grid<T, kHeadsAtOnce<T, kNorm>>(a, tokens, grid)) return kHeadTooWide;
  if (grid.items == 0) return nullptr;
  grid.vectors = grid.vectors && whole_vectors<T>(a.x) && whole_vectors<T>(a.y);
  grid.chunk = int64_t(grid.teams()) * kSteps;
  return launch(qk_fwd_kernel<T, kNorm>, grid_of((grid.items + grid.chunk - 1) / grid.chunk),
                dim3(kQkThreads), stream, a, grid);
}

}  // namespace

const char* qk_fwd_cuda(const QkFwd& a, int64_t tokens, void* stream) {
  return for_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    return a.norm == NormKind::none ? qk_fwd_launch<T, false>(a, tokens, stream)
                                    : qk_fwd_launch<T, true>(a, tokens, stream);
  });
}

}  // namespace ckptfused
