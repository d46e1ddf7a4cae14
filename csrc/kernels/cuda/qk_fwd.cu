#include "kernels/cuda/qk.cuh"
#include "kernels/cuda/qk.h"
#include "kernels/cuda/types.cuh"

namespace ckptfused {
namespace {

constexpr int kSteps = 4;  // items that a team takes one after the other

// kWhole: all parts' grids are.
template <typename T, QkNorm kNorm, bool kWhole>
__global__ void __launch_bounds__(kQkThreads, sizeof(T) == 8 ? 1 : 4)
    qk_fwd_kernel(const __grid_constant__ QkLaunch<QkFwd> parts) {
  const int part = parts.part_of(blockIdx.x);
  const QkFwd& a = parts.part[part];
  const QkGrid& grid = parts.grid[part];
  using A = acc_t<T>;
  constexpr int kAtOnce = kHeadsAtOnce<T, kNorm, false>;
  const HeadUnit unit = head_unit(a, int(threadIdx.x) % grid.lanes);
  const A inverse_dim = A(1) / A(a.head_dim);
  A weight[kUnit], bias[kUnit];
  if constexpr (kNorm != QkNorm::none) load_unit_gain(a, unit, weight);
  if constexpr (kNorm == QkNorm::any) load_unit_shift(a.bias, unit, bias);
  int64_t index =
      (int64_t(blockIdx.x) - grid.first_block) * grid.chunk + int(threadIdx.x) / grid.lanes;
  QkCursor cursor(a, grid, index);
  CKPT_NO_UNROLL
  for (int64_t done = 0; done < grid.chunk; done += grid.teams) {
    const int64_t head = cursor.item * kAtOnce;
    const int64_t heads = index < grid.items ? a.heads - head : 0;
    RawUnit<T, kWhole> raw[kAtOnce];
    CKPT_UNROLL
    for (int h = 0; h < kAtOnce; ++h) {
      raw[h].load(head_at<const T>(a.x, cursor, head + h), unit, h < heads, grid.vectors);
    }
    RawAngles<A, kWhole> angles;
    angles.load(a, grid, unit, cursor, heads > 0);
    const Rotation<A, kWhole> rotation(angles, A(1));
    CKPT_UNROLL
    for (int h = 0; h < kAtOnce; ++h) {
      A v[kUnit];
      raw[h].unpack(v);
      if constexpr (kNorm != QkNorm::none) {
        const NormStats<A> stats = head_stats<kNorm, kWhole>(a, grid, unit, inverse_dim, v);
        CKPT_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          const A xhat = normalised(v[i], stats);
          if constexpr (kNorm == QkNorm::plain) {
            v[i] = mul_rn(xhat, weight[i]);
          } else {
            v[i] = std::fma(xhat, weight[i], bias[i]);
          }
        }
      }
      rotation.apply(a, unit, v);
      store_unit<kWhole>(v, unit, h < heads, grid.vectors, head_at<T>(a.y, cursor, head + h));
    }
    index += grid.teams;
    cursor.step(a, grid);
  }
}

template <typename T, QkNorm kNorm>
const char* qk_fwd_launch(const QkParts<QkFwd>& parts, int64_t tokens, void* stream) {
  QkLaunch<QkFwd> all;
  for (int n = 0; n < parts.count; ++n) {
    const QkFwd& a = parts.part[n];
    QkGrid grid;
    if (!set_qk_grid<T, kHeadsAtOnce<T, kNorm, false>>(a, tokens, grid)) return kHeadTooWide;
    grid.vectors = grid.vectors && whole_vectors<T>(a.x) && whole_vectors<T>(a.y);
    grid.chunk = int64_t(grid.teams) * kSteps;
    grid.blocks = (grid.items + grid.chunk - 1) / grid.chunk;
    grid.whole = is_whole(a, grid);
    all.add(a, grid);
  }
  if (all.count == 0) return nullptr;
  return launch(all.whole() ? qk_fwd_kernel<T, kNorm, true> : qk_fwd_kernel<T, kNorm, false>,
                grid_of(all.blocks()), dim3(kQkThreads), stream, all);
}

}  // namespace

const char* qk_fwd_cuda(const QkParts<QkFwd>& parts, int64_t tokens, void* stream) {
  bool plain = true;
  for (int n = 0; n < parts.count; ++n) plain &= parts.part[n].bias.data == nullptr;
  return for_type(parts.part[0].dtype, [&](auto t) {
    return for_norm(parts, plain, [&](auto norm) {
      return qk_fwd_launch<decltype(t), decltype(norm)::value>(parts, tokens, stream);
    });
  });
}

}  // namespace ckptfused
