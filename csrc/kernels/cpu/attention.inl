CKPT_BEGIN_TARGET

// The draws of row r for the tile's columns. Those of wide tiles are made 128 at a time, as whole
// vectors: what is over is used by none.
CKPT_HD const uint16_t* tile_draws(const AttentionRule& rule, const ScoreTile& tile, int64_t r,
                                   uint16_t* buffer) {
  const int64_t cols = tile.cols > 64 ? (tile.cols + 127) / 128 * 128 : tile.cols;
  return dropout_draws(rule.dropout, rule.dropout_row + tile.query + r, tile.key, tile.key + cols,
                       buffer);
}

template <typename A, typename C>
void fwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores,
              const SoftmaxRows<A>& state, C* probs, int64_t probs_stride) {
  BiasRows<A> bias{rule, tile};
  uint16_t buffer[kKeyTile];
  const uint32_t threshold = rule.dropout.threshold;
  const int64_t n = tile.cols;
  alignas(64) A shifts[kQueryTile];
  A factor = 1;  // of all rows
  // All rows' maxima first: no row then waits for its own.
  for (int64_t r = 0; r < tile.rows; ++r) {
    A* s = scores + r * tile.stride;
    factor = kLog2E<A> * products_to_unscaled(rule, tile, bias, r, s);
    const A old_max = state.max[r], largest = row_max(s, n);
    const A new_max = largest > old_max ? largest : old_max;
    shifts[r] = softmax_shift(new_max);
    const A rescale = exp2_softmax(factor * (old_max - shifts[r]));
    state.max[r] = new_max;
    state.sum[r] *= rescale;
    if (rescale != A(1)) {
      A* out = state.out + r * state.head_dim;
      CKPT_IVDEP
      for (int64_t i = 0; i < state.head_dim; ++i) out[i] *= rescale;
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    const A* s = scores + r * tile.stride;
    const A shift = shifts[r];
    C* p = probs + r * probs_stride;
    A lane[kBlock] = {};
    if (threshold == 0) {
      for (int64_t i = 0; i < n; i += kBlock) {
        CKPT_IVDEP
        for (int l = 0; l < kBlock; ++l) {
          const A prob = exp2_softmax(factor * (s[i + l] - shift));
          lane[l] += prob;
          p[i + l] = converted<C>(prob);
        }
      }
    } else {
      const uint16_t* draws = tile_draws(rule, tile, r, buffer);
      for (int64_t i = 0; i < n; i += kBlock) {
        CKPT_IVDEP
        for (int l = 0; l < kBlock; ++l) {
          const A prob = exp2_softmax(factor * (s[i + l] - shift));
          lane[l] += prob;
          p[i + l] = converted<C>(dropout_apply(prob, draws[i + l], threshold, A(1)));
        }
      }
    }
    state.sum[r] += fold_lanes<kBlock>(lane);
  }
}

template <typename T>
void finish_rows(const SoftmaxRows<acc_t<T>>& state, const AttentionRule& rule, int64_t rows, T* o,
                 int64_t o_stride, acc_t<T>* lse) {
  using A = acc_t<T>;
  const A scale = rule.dropout.scale_as<A>(), unit = plain_logits(rule) ? A(rule.scale) : A(1);
  for (int64_t r = 0; r < rows; ++r) {
    const A sum = state.sum[r];
    const bool masked = sum == 0;
    const A factor = scale / sum;
    const A* out = state.out + r * state.head_dim;
    T* row = o + r * o_stride;
    CKPT_IVDEP
    for (int64_t i = 0; i < state.head_dim; ++i) from_acc(masked ? A(0) : out[i] * factor, row[i]);
    lse[r] = masked ? A(-INFINITY) : unit * state.max[r] + std::log(sum);
  }
}

template <typename T>
void delta_rows(const T* dout, int64_t dout_stride, const T* o, int64_t o_stride, int64_t rows,
                int64_t cols, acc_t<T>* delta) {
  for (int64_t r = 0; r < rows; ++r) {
    delta[r] = dot_row(dout + r * dout_stride, o + r * o_stride, cols);
  }
}

// What forward's rows were: probabilities before dropout, and gradients of the products.
template <typename A>
void bwd_row(const AttentionRule& rule, const ScoreTile& tile, BiasRows<A>& bias, int64_t r, A* s,
             A* ds, A lse, A delta) {
  alignas(64) A slope[kKeyTile];
  uint16_t buffer[kKeyTile];
  const uint32_t threshold = rule.dropout.threshold;
  const A scale = A(rule.scale), kept = rule.dropout.scale_as<A>();
  const int64_t n = tile.cols;
  const A shift = softmax_shift(lse);
  const KeyRange seen = products_to_logits(rule, tile, bias, r, s, slope);
  fill_unseen(tile, seen, A(0), ds);
  if (threshold == 0) {
    for_columns(n, [&](int64_t i) {
      s[i] = prob_of(s[i], shift);
      ds[i] = scale * s[i] * (ds[i] - delta);
    });
  } else {
    const uint16_t* draws = tile_draws(rule, tile, r, buffer);
    for_columns(n, [&](int64_t i) {
      const A prob = prob_of(s[i], shift);
      s[i] = dropout_apply(prob, draws[i], threshold, kept);
      ds[i] = scale * prob * (dropout_apply(ds[i], draws[i], threshold, kept) - delta);
    });
  }
  if (rule.softcap != 0) {
    for_columns(n, [&](int64_t i) { ds[i] *= slope[i]; });
  }
}

template <typename A, typename C>
void bwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores, A* dprobs, const A* lse,
              const A* delta, const BackwardOperands<C>& out) {
  BiasRows<A> bias{rule, tile};
  const int64_t n = tile.cols, stride = tile.stride;
  for (int64_t r = 0; r < tile.rows; ++r) {
    bwd_row(rule, tile, bias, r, scores + r * stride, dprobs + r * stride, lse[r], delta[r]);
    if constexpr (kRowsAbreast<C> == 2) {
      const A* ds = dprobs + r * stride;
      C* left = out.left_dprobs + r * n;
      CKPT_IVDEP
      for (int64_t i = 0; i < n; ++i) left[i] = converted<C>(ds[i]);
      const bool odd = r % 2 == 1, last = r + 1 == tile.rows;
      if (!odd && !last) continue;
      const int64_t low = r - odd;
      const auto pair = [&](const A* rows, C* right) {
        interleave_rows(rows + low * stride, odd ? rows + r * stride : nullptr, n,
                        reinterpret_cast<Pair*>(right + low * n));
      };
      pair(scores, out.right_probs);
      pair(dprobs, out.right_dprobs);
    }
  }
}

template <typename A>
void small(int64_t rows, int64_t cols, int64_t depth, const A* left, int64_t left_stride,
           const A* right, int64_t right_stride, A* out, int64_t out_stride, bool add) {
  for (int64_t r = 0; r < rows; ++r) {
    A* y = out + r * out_stride;
    for (int64_t c = 0; !add && c < cols; ++c) y[c] = A(0);
    for (int64_t i = 0; i < depth; ++i) {
      const A factor = left[r * left_stride + i];
      const A* x = right + i * right_stride;
      CKPT_IVDEP
      for (int64_t c = 0; c < cols; ++c) y[c] += factor * x[c];
    }
  }
}

template <typename T>
void store_rows(const acc_t<T>* in, int64_t in_stride, int64_t rows, int64_t cols, T* out,
                int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r) store_row(in + r * in_stride, out + r * out_stride, cols);
}

CKPT_END_TARGET
