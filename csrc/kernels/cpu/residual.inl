CKPT_BEGIN_TARGET

// row = m * drop(row)
template <typename A>
inline void scale_and_drop(const Dropout& dropout, int64_t logical_row, A m, A* row, int64_t n,
                           uint16_t* buffer) {
  if (!dropout.active()) {
    if (m == A(1)) return;
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) row[i] *= m;
    return;
  }
  const uint16_t* draws = dropout_draws(dropout, logical_row, 0, n, buffer);
  const uint32_t threshold = dropout.threshold;
  const A scale = m * dropout.scale_as<A>();
  CKPT_IVDEP
  for (int64_t i = 0; i < n; ++i) row[i] = dropout_apply(row[i], draws[i], threshold, scale);
}

template <typename R, typename P>
void residual_fwd_typed(const ResidualFwd& a, int64_t begin, int64_t end, RowScratch& scratch) {
  using A = acc_t<R>;
  const int64_t n = a.cols;
  A* f = scratch.take<A>(n);
  R* rounded = scratch.take<R>(n);
  uint16_t* buffer = scratch.take<uint16_t>(dropout_buffer_size(n));
  const bool post = a.post != NormKind::none, next = a.normed != nullptr;
  const A* post_gain = post ? norm_gain<A>(a.post, a.post_weight, n, scratch) : nullptr;
  const A* post_bias = post ? norm_bias<A>(a.post_bias, n, scratch) : nullptr;
  const A* next_gain = next ? norm_gain<A>(a.next, a.next_weight, n, scratch) : nullptr;
  const A* next_bias = next ? norm_bias<A>(a.next_bias, n, scratch) : nullptr;
  for (int64_t row = begin; row < end; ++row) {
    load_row(static_cast<const P*>(a.f) + row * n, f, n);
    if (post) norm_apply(f, norm_stats(a.post, f, n, A(a.post_eps)), post_gain, post_bias, f, n);
    scale_and_drop(a.dropout, a.row_map(row), A(a.m), f, n, buffer);
    const R* x = static_cast<const R*>(a.x) + row * n;
    R* sum = a.sum != nullptr ? static_cast<R*>(a.sum) + row * n : rounded;
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) from_acc(to_acc(x[i]) + f[i], sum[i]);
    if (!next) continue;
    load_row(sum, f, n);
    const NormStats<A> stats = norm_stats(a.next, f, n, A(a.next_eps));
    if (a.normed_dtype == a.p) {
      norm_apply(f, stats, next_gain, next_bias, static_cast<P*>(a.normed) + row * n, n);
    } else {
      norm_apply(f, stats, next_gain, next_bias, static_cast<R*>(a.normed) + row * n, n);
    }
  }
}

bool residual_fwd(const ResidualFwd& a, int64_t begin, int64_t end, RowScratch& scratch) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) {
    residual_fwd_typed<decltype(r), decltype(p)>(a, begin, end, scratch);
  });
}

template <typename R, typename P>
void residual_bwd_typed(const ResidualBwd& a, int64_t begin, int64_t end, void* dweight,
                        void* dbias, RowScratch& scratch) {
  using A = acc_t<R>;
  const int64_t n = a.cols;
  A* grad = scratch.take<A>(n);
  A* f = scratch.take<A>(n);
  uint16_t* buffer = scratch.take<uint16_t>(dropout_buffer_size(n));
  const bool post = a.post != NormKind::none;
  const A* gain = post ? norm_gain<A>(a.post, a.post_weight, n, scratch) : nullptr;
  for (int64_t row = begin; row < end; ++row) {
    load_row(static_cast<const R*>(a.ds) + row * n, grad, n);
    scale_and_drop(a.dropout, a.row_map(row), A(a.m), grad, n, buffer);
    if (post) {
      load_row(static_cast<const P*>(a.f) + row * n, f, n);
      norm_grad(a.post, f, grad, gain, static_cast<A*>(dweight), static_cast<A*>(dbias),
                A(a.post_eps), n);
    }
    store_row(grad, static_cast<P*>(a.df) + row * n, n);
  }
}

bool residual_bwd(const ResidualBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias,
                  RowScratch& scratch) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) {
    residual_bwd_typed<decltype(r), decltype(p)>(a, begin, end, dweight, dbias, scratch);
  });
}

CKPT_END_TARGET
