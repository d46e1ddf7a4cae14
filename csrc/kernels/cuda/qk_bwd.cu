#include "kernels/cuda/qk.cuh"
#include "kernels/cuda/qk.h"
#include "kernels/cuda/types.cuh"

namespace ckptfused {
namespace {

constexpr int kSteps = 4;  // items that a team takes one after the other, where no sum is wanted

// A block's sum over its teams, in their order, of what their lanes hold: its row of partials.
template <typename A>
__device__ __forceinline__ void store_partial(const QkShape& a, const QkGrid& grid,
                                              const HeadUnit& unit, const A* sums, int64_t block,
                                              void* partials) {
  __shared__ A shared[kQkThreads * kUnit];
  if (partials == nullptr) return;  // alike for all threads
  const int thread = int(threadIdx.x), lane = thread % grid.lanes, team = thread / grid.lanes;
  __syncthreads();  // the last sum has been read
  CKPT_UNROLL
  for (int i = 0; i < kUnit; ++i) shared[i * kQkThreads + thread] = sums[i];
  __syncthreads();
  for (int i = team; i < kUnit; i += grid.teams) {
    const bool second = i >= kGroup;
    const int j = i % kGroup;
    if (j >= (second ? unit.count[1] : unit.count[0])) continue;
    A sum = 0;
    for (int t = 0; t < grid.teams; ++t) sum += shared[i * kQkThreads + t * grid.lanes + lane];
    const int col = (second ? unit.first[1] : unit.first[0]) + j;
    static_cast<A*>(partials)[block * a.head_dim + col] = sum;
  }
}

template <typename T, QkNorm kNorm, bool kWhole>
__device__ __forceinline__ void qk_bwd_heads(const QkBwd& a, const QkGrid& grid,
                                             const QkGrads& grads, int64_t block) {
  using A = acc_t<T>;
  constexpr int kAtOnce = kHeadsAtOnce<T, kNorm, true>;
  const HeadUnit unit = head_unit(a, int(threadIdx.x) % grid.lanes);
  const A inverse_dim = A(1) / A(a.head_dim);
  A weight[kUnit], dw[kUnit] = {}, db[kUnit] = {};
  if constexpr (kNorm != QkNorm::none) load_unit_gain(a, unit, weight);
  const int64_t begin = block * grid.chunk;
  int64_t index = begin + int(threadIdx.x) / grid.lanes;
  const int64_t end = begin + grid.chunk < grid.items ? begin + grid.chunk : grid.items;
  QkCursor cursor(a, grid, index);
  CKPT_NO_UNROLL
  for (int64_t done = 0; done < grid.chunk; done += grid.teams) {
    const int64_t head = cursor.item * kAtOnce;
    const int64_t heads = index < end ? a.heads - head : 0;
    RawUnit<T, kWhole> raw_dy[kAtOnce], raw_x[kAtOnce];
    CKPT_UNROLL
    for (int h = 0; h < kAtOnce; ++h) {
      raw_dy[h].load(head_at<const T>(a.dy, cursor, head + h), unit, h < heads, grid.vectors);
      if constexpr (kNorm != QkNorm::none) {
        raw_x[h].load(head_at<const T>(a.x, cursor, head + h), unit, h < heads, grid.vectors);
      }
    }
    RawAngles<A, kWhole> angles;
    angles.load(a, grid, unit, cursor, heads > 0);
    const Rotation<A, kWhole> rotation(angles, A(-1));
    CKPT_UNROLL
    for (int h = 0; h < kAtOnce; ++h) {
      A g[kUnit];
      raw_dy[h].unpack(g);
      rotation.apply(a, unit, g);
      if constexpr (kNorm != QkNorm::none) {
        A xhat[kUnit];
        raw_x[h].unpack(xhat);
        NormStats<A> stats = head_stats<kNorm, kWhole>(a, grid, unit, inverse_dim, xhat);
        // Lanes without a head, or a column, hold zeros, of which xhat is to make zeros whatever
        // rstd is.
        if (kWhole && (unit.count[0] == 0 || h >= heads)) stats = {};
        A sum_g = 0, sum_gx = 0;
        CKPT_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          xhat[i] = normalised(xhat[i], stats);
          if (!kWhole && (i % kGroup >= unit.count[i / kGroup] || h >= heads)) xhat[i] = 0;
          dw[i] = std::fma(g[i], xhat[i], dw[i]);
          if constexpr (kNorm == QkNorm::any) db[i] += g[i];
          g[i] = mul_rn(g[i], weight[i]);
          if constexpr (kNorm == QkNorm::any) sum_g += g[i];
          sum_gx = std::fma(g[i], xhat[i], sum_gx);
        }
        const A mean_gx = mul_rn(team_sum(sum_gx, grid.lanes), inverse_dim);
        A mean_g = 0;
        if (kNorm == QkNorm::any && norm_is_centred(a.norm)) {
          mean_g = mul_rn(team_sum(sum_g, grid.lanes), inverse_dim);
        }
        CKPT_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          g[i] = mul_rn(stats.rstd, std::fma(-xhat[i], mean_gx, g[i] - mean_g));
        }
      }
      store_unit<kWhole>(g, unit, h < heads, grid.vectors, head_at<T>(a.dx, cursor, head + h));
    }
    index += grid.teams;
    cursor.step(a, grid);
  }
  if constexpr (kNorm != QkNorm::none) store_partial(a, grid, unit, dw, block, grads.dweight);
  if constexpr (kNorm == QkNorm::any) store_partial(a, grid, unit, db, block, grads.dbias);
}

// Blocks that a multiprocessor must be able to hold; more of a norm of heads that are not whole
// would spill.
template <typename T, QkNorm kNorm, bool kWhole>
constexpr int kQkGradBlocks = sizeof(T) == 8                     ? 1
                              : kNorm != QkNorm::none && !kWhole ? 3
                                                                 : 4;

// kWhole: all parts' grids are.
template <typename T, QkNorm kNorm, bool kWhole>
__global__ void __launch_bounds__(kQkThreads, (kQkGradBlocks<T, kNorm, kWhole>))
    qk_bwd_kernel(const __grid_constant__ QkLaunch<QkBwd> parts) {
  const int part = parts.part_of(blockIdx.x);
  const QkGrid& grid = parts.grid[part];
  const int64_t block = int64_t(blockIdx.x) - grid.first_block;
  if (kNorm != QkNorm::none && parts.part[part].norm != NormKind::none) {
    qk_bwd_heads<T, kNorm, kWhole>(parts.part[part], grid, parts.grads[part], block);
  } else {
    qk_bwd_heads<T, QkNorm::none, kWhole>(parts.part[part], grid, parts.grads[part], block);
  }
}

// Of one part: its grid.
template <typename T, QkNorm kNorm>
bool set_qk_bwd_grid(const QkBwd& a, const QkGrads& grads, int64_t tokens, QkGrid& grid) {
  if (!set_qk_grid<T, kHeadsAtOnce<T, kNorm, true>>(a, tokens, grid)) return false;
  grid.vectors = grid.vectors && whole_vectors<T>(a.dy) && whole_vectors<T>(a.dx) &&
                 (kNorm == QkNorm::none || whole_vectors<T>(a.x));
  const bool sums = kNorm != QkNorm::none && (grads.dweight != nullptr || grads.dbias != nullptr);
  grid.chunk = sums ? (grid.items + grads.chunks - 1) / grads.chunks : grid.teams * kSteps;
  grid.whole = is_whole(a, grid);
  grid.blocks = sums ? grads.chunks : (grid.items + grid.chunk - 1) / grid.chunk;
  return true;
}

template <typename T, QkNorm kNorm>
const char* qk_bwd_launch(const QkParts<QkBwd>& parts, const QkGrads* grads, int64_t tokens,
                          void* stream) {
  QkLaunch<QkBwd> all;
  for (int n = 0; n < parts.count; ++n) {
    const QkBwd& a = parts.part[n];
    QkGrid grid;
    if (!(kNorm != QkNorm::none && a.norm != NormKind::none
              ? set_qk_bwd_grid<T, kNorm>(a, grads[n], tokens, grid)
              : set_qk_bwd_grid<T, QkNorm::none>(a, grads[n], tokens, grid))) {
      return kHeadTooWide;
    }
    all.grads[all.count] = grads[n];
    all.add(a, grid);
  }
  if (all.count == 0) return nullptr;
  return launch(all.whole() ? qk_bwd_kernel<T, kNorm, true> : qk_bwd_kernel<T, kNorm, false>,
                grid_of(all.blocks()), dim3(kQkThreads), stream, all);
}

}  // namespace

const char* qk_bwd_cuda(const QkParts<QkBwd>& parts, const QkGrads* grads, int64_t tokens,
                        void* stream) {
  bool plain = true;
  for (int n = 0; n < parts.count; ++n) plain &= grads[n].dbias == nullptr;
  return for_type(parts.part[0].dtype, [&](auto t) {
    return for_norm(parts, plain, [&](auto norm) {
      return qk_bwd_launch<decltype(t), decltype(norm)::value>(parts, grads, tokens, stream);
    });
  });
}

}  // namespace ckptfused
