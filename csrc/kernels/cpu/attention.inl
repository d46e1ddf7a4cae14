CKPT_BEGIN_TARGET

template <typename A>
void fwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores,
              const SoftmaxRows<A>& state) {
  BiasRows<A> bias{rule, tile};
  uint16_t buffer[kKeyTile + 16];
  const A cap = A(rule.softcap);
  const uint32_t threshold = rule.dropout.threshold;
  for (int64_t r = 0; r < tile.rows; ++r) {
    A* row = scores + r * tile.stride;
    const KeyRange seen = clip_row(rule, tile, r, row);
    A* s = row + seen.begin;
    const int64_t n = seen.end - seen.begin;
    if (cap != 0) {
      CKPT_IVDEP
      for (int64_t i = 0; i < n; ++i) s[i] = cap * tanh_acc(s[i] / cap);
    }
    bias.add(r, seen.begin, seen.end, row);

    const A old_max = state.max[r], new_max = lane_max(s, n, old_max);
    const A shift = softmax_shift(new_max);
    const A sum = exp_row(s, n, shift);
    const A rescale = exp_acc(old_max - shift);
    state.max[r] = new_max;
    state.sum[r] = state.sum[r] * rescale + sum;
    if (rescale != A(1)) {
      A* out = state.out + r * state.head_dim;
      CKPT_IVDEP
      for (int64_t i = 0; i < state.head_dim; ++i) out[i] *= rescale;
    }
    if (threshold != 0) {
      const int64_t key = tile.key + seen.begin;
      const uint16_t* draws =
          dropout_draws(rule.dropout, rule.dropout_row + tile.query + r, key, key + n, buffer);
      CKPT_IVDEP
      for (int64_t i = 0; i < n; ++i) s[i] = dropout_apply(s[i], draws[i], threshold, A(1));
    }
  }
}

template <typename T>
void finish_rows(const SoftmaxRows<acc_t<T>>& state, const Dropout& dropout, int64_t rows, T* o,
                 int64_t o_stride, acc_t<T>* lse) {
  using A = acc_t<T>;
  const A scale = dropout.scale_as<A>();
  for (int64_t r = 0; r < rows; ++r) {
    const A sum = state.sum[r];
    const bool masked = sum == 0;
    const A factor = scale / sum;
    const A* out = state.out + r * state.head_dim;
    T* row = o + r * o_stride;
    CKPT_IVDEP
    for (int64_t i = 0; i < state.head_dim; ++i) from_acc(masked ? A(0) : out[i] * factor, row[i]);
    lse[r] = masked ? A(-INFINITY) : state.max[r] + std::log(sum);
  }
}

template <typename T>
void delta_rows(const acc_t<T>* dout, int64_t dout_stride, const T* o, int64_t o_stride,
                int64_t rows, int64_t cols, acc_t<T>* delta) {
  for (int64_t r = 0; r < rows; ++r) {
    delta[r] = dot_row(dout + r * dout_stride, o + r * o_stride, cols);
  }
}

template <typename A>
void bwd_tile(const AttentionRule& rule, const ScoreTile& tile, A* scores, A* dprobs, const A* lse,
              const A* delta) {
  BiasRows<A> bias{rule, tile};
  alignas(64) A slope[kKeyTile];
  uint16_t buffer[kKeyTile + 16];
  const A cap = A(rule.softcap);
  const uint32_t threshold = rule.dropout.threshold;
  const A scale = rule.dropout.scale_as<A>();
  for (int64_t r = 0; r < tile.rows; ++r) {
    A* row = scores + r * tile.stride;
    A* drow = dprobs + r * tile.stride;
    const KeyRange seen = clip_row(rule, tile, r, row);
    clip_row(rule, tile, r, drow);
    A* s = row + seen.begin;
    A* ds = drow + seen.begin;
    const int64_t n = seen.end - seen.begin;
    if (cap != 0) {
      CKPT_IVDEP
      for (int64_t i = 0; i < n; ++i) {
        const A t = tanh_acc(s[i] / cap);
        slope[i] = A(1) - t * t;
        s[i] = cap * t;
      }
    }
    bias.add(r, seen.begin, seen.end, row);

    const A shift = softmax_shift(lse[r]), mean = delta[r];
    if (threshold == 0) {
      CKPT_IVDEP
      for (int64_t i = 0; i < n; ++i) {
        s[i] = exp_acc(s[i] - shift);
        ds[i] = s[i] * (ds[i] - mean);
      }
    } else {
      const int64_t key = tile.key + seen.begin;
      const uint16_t* draws =
          dropout_draws(rule.dropout, rule.dropout_row + tile.query + r, key, key + n, buffer);
      CKPT_IVDEP
      for (int64_t i = 0; i < n; ++i) {
        const A prob = exp_acc(s[i] - shift);
        s[i] = dropout_apply(prob, draws[i], threshold, scale);
        ds[i] = prob * (dropout_apply(ds[i], draws[i], threshold, scale) - mean);
      }
    }
    if (cap != 0) {
      CKPT_IVDEP
      for (int64_t i = 0; i < n; ++i) ds[i] *= slope[i];
    }
  }
}

template <typename A>
void small(const SmallMatrix<A>& out, const SmallMatrix<A>& a, const SmallMatrix<A>& b,
           int64_t rows, int64_t cols, int64_t depth, A alpha, bool add) {
  for (int64_t r = 0; r < rows; ++r) {
    A* y = out.data + r * out.row_stride;
    const A* left = a.data + r * a.row_stride;
    if (b.col_stride != 1) {  // b's columns are contiguous, and a's rows with them
      for (int64_t c = 0; c < cols; ++c) {
        const A sum = dot_row<A>(left, b.data + c * b.col_stride, depth);
        y[c] = add ? y[c] + alpha * sum : alpha * sum;
      }
      continue;
    }
    if (!add) std::fill_n(y, cols, A(0));
    for (int64_t i = 0; i < depth; ++i) {
      const A factor = alpha * left[i * a.col_stride];
      const A* right = b.data + i * b.row_stride;
      CKPT_IVDEP
      for (int64_t c = 0; c < cols; ++c) y[c] += factor * right[c];
    }
  }
}

template <typename T>
void load_rows(const T* in, int64_t in_stride, int64_t rows, int64_t cols, acc_t<T>* out) {
  for (int64_t r = 0; r < rows; ++r) load_row(in + r * in_stride, out + r * cols, cols);
}

template <typename T>
void store_rows(const acc_t<T>* in, int64_t rows, int64_t cols, T* out, int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r) store_row(in + r * cols, out + r * out_stride, cols);
}

CKPT_END_TARGET
