CKPT_BEGIN_TARGET

template <typename R, typename P>
void norm_fwd_typed(const NormFwd& a, int64_t begin, int64_t end, RowScratch& scratch) {
  using A = acc_t<R>;
  A* row = scratch.take<A>(a.cols);
  const A* gain = norm_gain<A>(a.kind, a.weight, a.cols, scratch);
  const A* bias = norm_bias<A>(a.bias, a.cols, scratch);
  for (int64_t n = begin; n < end; ++n) {
    load_row(static_cast<const R*>(a.x) + n * a.cols, row, a.cols);
    const NormStats<A> stats = norm_stats(a.kind, row, a.cols, A(a.eps));
    norm_apply(row, stats, gain, bias, static_cast<P*>(a.y) + n * a.cols, a.cols);
  }
}

bool norm_fwd(const NormFwd& a, int64_t begin, int64_t end, RowScratch& scratch) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) {
    norm_fwd_typed<decltype(r), decltype(p)>(a, begin, end, scratch);
  });
}

template <typename R, typename P>
void norm_bwd_typed(const NormBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias,
                    RowScratch& scratch) {
  using A = acc_t<R>;
  A* x = scratch.take<A>(a.cols);
  A* dy = scratch.take<A>(a.cols);
  const A* gain = norm_gain<A>(a.kind, a.weight, a.cols, scratch);
  for (int64_t n = begin; n < end; ++n) {
    load_row(static_cast<const R*>(a.x) + n * a.cols, x, a.cols);
    load_row(static_cast<const P*>(a.dy) + n * a.cols, dy, a.cols);
    norm_grad(a.kind, x, dy, gain, static_cast<A*>(dweight), static_cast<A*>(dbias), A(a.eps),
              a.cols);
    if (a.dx == nullptr) continue;
    R* dx = static_cast<R*>(a.dx) + n * a.cols;
    if (a.dres != nullptr) {
      const R* dres = static_cast<const R*>(a.dres) + n * a.cols;
      CKPT_IVDEP
      for (int64_t i = 0; i < a.cols; ++i) from_acc(to_acc(dres[i]) + dy[i], dx[i]);
    } else {
      store_row(dy, dx, a.cols);
    }
  }
}

bool norm_bwd(const NormBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias,
              RowScratch& scratch) {
  return for_row_types(a.r, a.p, [&](auto r, auto p) {
    norm_bwd_typed<decltype(r), decltype(p)>(a, begin, end, dweight, dbias, scratch);
  });
}

template <typename A>
void sum_grads_typed(const GradSum& s, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = 512;
  A sums[kColumns];
  for (int64_t col = begin; col < end; col += kColumns) {
    const int64_t n = end - col < kColumns ? end - col : kColumns;
    for (int64_t c = 0; c < n; ++c) sums[c] = 0;
    for (int64_t k = 0; k < s.count; ++k) {
      const A* partial = static_cast<const A*>(s.from) + k * s.cols + col;
      CKPT_IVDEP
      for (int64_t c = 0; c < n; ++c) sums[c] += partial[c];
    }
    for_type(s.type, [&](auto t) {
      auto* to = static_cast<decltype(t)*>(s.to) + col;
      CKPT_IVDEP
      for (int64_t c = 0; c < n; ++c) from_acc(acc_t<decltype(t)>(sums[c]), to[c]);
    });
  }
}

void sum_grads(const GradSum& s, DType acc, int64_t begin, int64_t end) {
  acc == DType::f64 ? sum_grads_typed<double>(s, begin, end)
                    : sum_grads_typed<float>(s, begin, end);
}

CKPT_END_TARGET
