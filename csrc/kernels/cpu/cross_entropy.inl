CKPT_BEGIN_TARGET

// A row is read from memory once: the passes after the first find it in the second-level cache.
template <typename T, bool kMayCap>
struct CrossEntropyKernel {
  using A = acc_t<T>;
  using Map = LogitMap<A, kMayCap>;

  // The largest logit. Both the scale and the soft-cap keep or turn round the order of the
  // products, so that only the extreme one has to be mapped. NaN is passed over: the sum has it.
  static A largest(const T* x, int64_t n, const Map& map) {
    const A sign = map.scale < A(0) ? A(-1) : A(1);
    constexpr int kLanes = 128 / int(sizeof(A));
    A lane[kLanes];
    for (int l = 0; l < kLanes; ++l) lane[l] = A(-INFINITY);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      CKPT_IVDEP
      for (int l = 0; l < kLanes; ++l) {
        const A value = sign * to_acc(x[i + l]);
        lane[l] = value > lane[l] ? value : lane[l];
      }
    }
    A most = A(-INFINITY);
    for (; i < n; ++i) most = sign * to_acc(x[i]) > most ? sign * to_acc(x[i]) : most;
    for (int l = 0; l < kLanes; ++l) most = lane[l] > most ? lane[l] : most;
    return map.value(sign * most);
  }

  CKPT_HD static A logit(const T* x, int64_t i, const Map& map) { return map.value(to_acc(x[i])); }

  // The sum of term(0) .. term(n - 1): runs in the accumulation type, their sums in double, so that
  // its error does not grow with the vocabulary.
  template <typename Term>
  CKPT_HD static A row_sum(int64_t n, Term term) {
    constexpr int64_t kRun = 1024;
    double sum = 0;
    for (int64_t begin = 0; begin < n; begin += kRun) {
      const int64_t count = n - begin < kRun ? n - begin : kRun;
      sum += lane_sum<A>(count, [&](int64_t i) { return term(begin + i); });
    }
    return A(sum);
  }

  // The first i of n for which found(i), else n: whole blocks without one are passed over.
  template <typename Found>
  CKPT_HD static int64_t first(int64_t n, Found found) {
    constexpr int64_t kBlock = 512;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = begin + kBlock < n ? begin + kBlock : n;
      int32_t any = 0;
      for (int64_t i = begin; i < end; ++i) any |= int32_t(found(i));
      for (int64_t i = begin; any != 0 && i < end; ++i) {
        if (found(i)) return i;
      }
    }
    return n;
  }

  // The first class with the largest logit; the first NaN where there is one. The sum is NaN, too,
  // where the largest is infinite.
  static int64_t argmax(const T* x, int64_t n, const Map& map, A max, A sum) {
    int64_t at = n;
    if (sum != sum) {
      at = first(n, [&](int64_t i) {
        const A value = logit(x, i, map);
        return value != value;
      });
    }
    return at < n ? at : first(n, [&](int64_t i) { return logit(x, i, map) == max; });
  }

  // dloss/dproduct over the products of a row.
  static void write_gradient(const CrossEntropyShape& a, const Map& map, T* x, int64_t target,
                             A lse, A factor) {
    if (target == a.ignore_index) {
      for (int64_t i = 0; i < a.cols; ++i) from_acc(A(0), x[i]);
      return;
    }
    const A* weight = static_cast<const A*>(a.class_weight);
    const RowGradient<A> g = row_gradient(
        weight == nullptr ? A(1) : weight[target], A(a.smoothing), A(a.smooth),
        weight == nullptr ? A(a.classes) : weight[a.classes], A(a.z_loss), lse, factor);
    const int64_t at = target - a.col0;
    const bool here = 0 <= at && at < a.cols;
    const A own = here ? to_acc(x[at]) : A(0);
    if (weight == nullptr) {
      CKPT_IVDEP
      for (int64_t i = 0; i < a.cols; ++i) {
        const A l = logit(x, i, map);
        from_acc((exp_acc(l - lse) * g.all - g.smooth) * map.slope(l), x[i]);
      }
    } else {
      const A* w = weight + a.col0;
      CKPT_IVDEP
      for (int64_t i = 0; i < a.cols; ++i) {
        const A l = logit(x, i, map);
        from_acc((exp_acc(l - lse) * g.all - w[i] * g.smooth) * map.slope(l), x[i]);
      }
    }
    if (here) {
      const A l = map.value(own), w = weight == nullptr ? A(1) : weight[target];
      from_acc((exp_acc(l - lse) * g.all - w * g.smooth - g.target) * map.slope(l), x[at]);
    }
  }

  static void fwd(const CrossEntropyFwd& a, int64_t begin, int64_t end) {
    const Map map{A(a.scale), A(a.softcap)};
    const A* weight = static_cast<const A*>(a.class_weight);
    for (int64_t row = begin; row < end; ++row) {
      T* x = static_cast<T*>(a.logits) + row * a.stride;
      const int64_t target = a.target[row];
      const A max = largest(x, a.cols, map);
      const A sum = row_sum(a.cols, [&](int64_t i) { return exp_acc(logit(x, i, map) - max); });
      const A lse = max + std::log(sum);
      A loss = A(0);
      if (target != a.ignore_index) {
        const A own = weight == nullptr ? A(1) : weight[target];
        loss = own * (A(1) - A(a.smoothing)) * (lse - logit(x, target, map));
        // Each difference by itself: weight_sum * lse less a sum nearly as large would cancel.
        if (a.smooth != 0) {
          loss += A(a.smooth) * row_sum(a.cols, [&](int64_t i) {
                    return (weight == nullptr ? A(1) : weight[i]) * (lse - logit(x, i, map));
                  });
        }
        loss += A(a.z_loss) * lse * lse;
      }
      static_cast<A*>(a.loss)[row] = loss;
      static_cast<A*>(a.lse)[row] = lse;
      if (a.predicted != nullptr) a.predicted[row] = argmax(x, a.cols, map, max, sum);
      if (a.grad) write_gradient(a, map, x, target, lse, A(1));
    }
  }

  static void bwd(const CrossEntropyBwd& a, int64_t begin, int64_t end) {
    const Map map{A(a.scale), A(a.softcap)};
    for (int64_t row = begin; row < end; ++row) {
      const A factor = a.factor == nullptr ? A(1) : static_cast<const A*>(a.factor)[row];
      write_gradient(a, map, static_cast<T*>(a.logits) + row * a.stride, a.target[row],
                     static_cast<const A*>(a.lse)[row], factor);
    }
  }
};

// Calls f with the kernel of the logits' type and map.
template <typename F>
void for_kernel(const CrossEntropyShape& a, F f) {
  for_type(a.dtype, [&](auto t) {
    if (a.softcap != 0) {
      f(CrossEntropyKernel<decltype(t), true>{});
    } else {
      f(CrossEntropyKernel<decltype(t), false>{});
    }
  });
}

void cross_entropy_fwd(const CrossEntropyFwd& a, int64_t begin, int64_t end) {
  for_kernel(a, [&](auto kernel) { kernel.fwd(a, begin, end); });
}

void cross_entropy_bwd(const CrossEntropyBwd& a, int64_t begin, int64_t end) {
  for_kernel(a, [&](auto kernel) { kernel.bwd(a, begin, end); });
}

CKPT_END_TARGET
