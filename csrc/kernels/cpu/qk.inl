CKPT_BEGIN_TARGET

// The rotations of one token: r/2 cosines and sines, or none.
template <typename A>
struct TokenRotation {
  const A* cos;
  const A* sin;
  int64_t half;
};

template <typename A>
CKPT_HD TokenRotation<A> token_rotation(const QkShape& a, int64_t b, int64_t t) {
  const int64_t half = a.rope == RopeKind::none ? 0 : a.rotary_dim / 2;
  const int64_t offset = b * a.cos_batch_stride + t * half;
  return {static_cast<const A*>(a.cos) + offset, static_cast<const A*>(a.sin) + offset, half};
}

// to = from rotated, forward (direction 1) or back (-1); to and from are different memory.
template <typename T, typename A>
CKPT_HD void rotate(const QkShape& a, TokenRotation<A> by, A direction, const A* from, T* to) {
  if (a.rope == RopeKind::half) {
    CKPT_IVDEP
    for (int64_t i = 0; i < by.half; ++i) {
      const A x1 = from[i], x2 = from[by.half + i], sin = direction * by.sin[i];
      from_acc(rope_first(x1, x2, by.cos[i], sin), to[i]);
      from_acc(rope_second(x1, x2, by.cos[i], sin), to[by.half + i]);
    }
  } else {
    CKPT_IVDEP
    for (int64_t i = 0; i < by.half; ++i) {
      const A x1 = from[2 * i], x2 = from[2 * i + 1], sin = direction * by.sin[i];
      from_acc(rope_first(x1, x2, by.cos[i], sin), to[2 * i]);
      from_acc(rope_second(x1, x2, by.cos[i], sin), to[2 * i + 1]);
    }
  }
  CKPT_IVDEP
  for (int64_t i = 2 * by.half; i < a.head_dim; ++i) from_acc(from[i], to[i]);
}

template <typename T, typename Pointer>
CKPT_HD T* head(HeadsView<Pointer> view, int64_t b, int64_t t, int64_t h) {
  return static_cast<T*>(view.data) + b * view.batch_stride + t * view.time_stride +
         h * view.head_stride;
}

template <typename T>
void qk_fwd_typed(const QkFwd& a, int64_t begin, int64_t end, RowScratch& scratch) {
  using A = acc_t<T>;
  const int64_t dim = a.head_dim;
  A* row = scratch.take<A>(dim);
  const bool norm = a.norm != NormKind::none;
  const A* gain = norm ? norm_gain<A>(a.norm, a.weight, dim, scratch) : nullptr;
  const A* bias = norm ? norm_bias<A>(a.bias, dim, scratch) : nullptr;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t b = token / a.time, t = token % a.time;
    const TokenRotation<A> rotation = token_rotation<A>(a, b, t);
    for (int64_t h = 0; h < a.heads; ++h) {
      load_row(head<const T>(a.x, b, t, h), row, dim);
      if (norm) {
        norm_apply(row, norm_stats(a.norm, row, dim, A(a.eps)), gain, bias, row, dim);
      }
      rotate(a, rotation, A(1), row, head<T>(a.y, b, t, h));
    }
  }
}

template <typename T>
void qk_bwd_typed(const QkBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias,
                  RowScratch& scratch) {
  using A = acc_t<T>;
  const int64_t dim = a.head_dim;
  A* dy = scratch.take<A>(dim);
  A* x = scratch.take<A>(dim);
  A* dx = scratch.take<A>(dim);
  const bool norm = a.norm != NormKind::none;
  const A* gain = norm ? norm_gain<A>(a.norm, a.weight, dim, scratch) : nullptr;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t b = token / a.time, t = token % a.time;
    const TokenRotation<A> rotation = token_rotation<A>(a, b, t);
    for (int64_t h = 0; h < a.heads; ++h) {
      load_row(head<const T>(a.dy, b, t, h), dy, dim);
      if (!norm) {
        rotate(a, rotation, A(-1), dy, head<T>(a.dx, b, t, h));
        continue;
      }
      rotate(a, rotation, A(-1), dy, dx);
      load_row(head<const T>(a.x, b, t, h), x, dim);
      norm_grad(a.norm, x, dx, gain, static_cast<A*>(dweight), static_cast<A*>(dbias), A(a.eps),
                dim);
      store_row(dx, head<T>(a.dx, b, t, h), dim);
    }
  }
}

void qk_fwd(const QkFwd& a, int64_t begin, int64_t end, RowScratch& scratch) {
  for_type(a.dtype, [&](auto t) { qk_fwd_typed<decltype(t)>(a, begin, end, scratch); });
}

void qk_bwd(const QkBwd& a, int64_t begin, int64_t end, void* dweight, void* dbias,
            RowScratch& scratch) {
  for_type(a.dtype,
           [&](auto t) { qk_bwd_typed<decltype(t)>(a, begin, end, dweight, dbias, scratch); });
}

CKPT_END_TARGET
