CKPT_BEGIN_TARGET

// Columns taken at a time: the draws of a run and the outputs that nobody wants stay in L1.
constexpr int64_t kActivationRun = 512;

// The draws of a run, or the buffer as it is. One function for all kernels: inlined into each, the
// generator would be most of what the compiler has to do.
__attribute__((noinline)) const uint16_t* draw(const ActivationShape& a, int64_t row, int64_t col,
                                               int64_t n, uint16_t* buffer) {
  if (!a.dropout.active()) return buffer;
  return dropout_draws(a.dropout, row, a.col0 + col, a.col0 + col + n, buffer);
}

template <typename T, Activation kAct, bool kGated>
struct ActivationKernel {
  using A = acc_t<T>;

  static void fwd(const ActivationFwd& a, int64_t begin, int64_t end) {
    const uint32_t threshold = a.dropout.threshold;
    const A scale = a.dropout.scale_as<A>();
    const auto coefficients = a.coefficients_as<A>();
    uint16_t draw_buffer[kActivationRun + 16];
    keep_all(draw_buffer);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t logical_row = a.rows(a.row0 + row);
      for (int64_t col = 0; col < a.cols; col += kActivationRun) {
        const int64_t n = a.cols - col < kActivationRun ? a.cols - col : kActivationRun;
        const T* g = at(a.g, row, col);
        const T* u = at(a.u, row, col);
        T* h = at(a.h, row, col);
        const uint16_t* draws = draw(a, logical_row, col, n, draw_buffer);
        CKPT_IVDEP
        for (int64_t i = 0; i < n; ++i) {
          A value = activation_value<kAct>(A(to_acc(kGated ? g[i] : u[i])), coefficients);
          if (kGated) value *= to_acc(u[i]);
          from_acc(dropout_apply(value, draws[i], threshold, scale), h[i]);
        }
      }
    }
  }

  static void bwd(const ActivationBwd& a, int64_t begin, int64_t end) {
    const uint32_t threshold = a.dropout.threshold;
    const A scale = a.dropout.scale_as<A>();
    const auto coefficients = a.coefficients_as<A>();
    uint16_t draw_buffer[kActivationRun + 16];
    keep_all(draw_buffer);
    T unwanted[kActivationRun];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t logical_row = a.rows(a.row0 + row);
      XieluCoefficients<A> sums{};
      for (int64_t col = 0; col < a.cols; col += kActivationRun) {
        const int64_t n = a.cols - col < kActivationRun ? a.cols - col : kActivationRun;
        const T* g = at(a.g, row, col);
        const T* u = at(a.u, row, col);
        const T* dh = at(a.dh, row, col);
        T* h = a.h.data == nullptr ? unwanted : at(a.h, row, col);
        T* dg = a.dg.data == nullptr ? unwanted : at(a.dg, row, col);
        T* du = a.du.data == nullptr ? unwanted : at(a.du, row, col);
        const uint16_t* draws = draw(a, logical_row, col, n, draw_buffer);
        if constexpr (kAct == Activation::xielu) {
          if (a.sums != nullptr) {
            add_coefficient_grads(coefficients, u, dh, draws, threshold, scale, n, sums);
          }
        }
        CKPT_IVDEP
        for (int64_t i = 0; i < n; ++i) {
          const auto act =
              activation_with_grad<kAct>(A(to_acc(kGated ? g[i] : u[i])), coefficients);
          const A up = kGated ? to_acc(u[i]) : A(1);
          const A grad = dropout_apply(A(to_acc(dh[i])), draws[i], threshold, scale);
          from_acc(dropout_apply(act.value * up, draws[i], threshold, scale), h[i]);
          if (kGated) from_acc(grad * up * act.grad, dg[i]);
          from_acc(grad * (kGated ? act.value : act.grad), du[i]);
        }
      }
      if (kAct == Activation::xielu && a.sums != nullptr) {
        sums.eps *= slope_of_eps(coefficients);
        static_cast<XieluCoefficients<A>*>(a.sums)[coefficient_sums(row, a.cols)] = sums;
      }
    }
  }

 private:
  // Adds those of a run, before anything is written over u or dh.
  static void add_coefficient_grads(const XieluCoefficients<A>& coefficients, const T* u,
                                    const T* dh, const uint16_t* draws, uint32_t threshold, A scale,
                                    int64_t n, XieluCoefficients<A>& sums) {
    A positive[kActivationRun], negative[kActivationRun], beta[kActivationRun], eps[kActivationRun];
    CKPT_IVDEP
    for (int64_t i = 0; i < n; ++i) {
      const A grad = dropout_apply(A(to_acc(dh[i])), draws[i], threshold, scale);
      const XieluCoefficients<A> own = xielu_grads(coefficients, A(to_acc(u[i])), grad);
      positive[i] = own.positive;
      negative[i] = own.negative;
      beta[i] = own.beta;
      eps[i] = own.eps;
    }
    sums.positive += lane_sum<A>(n, [&](int64_t i) { return positive[i]; });
    sums.negative += lane_sum<A>(n, [&](int64_t i) { return negative[i]; });
    sums.beta += lane_sum<A>(n, [&](int64_t i) { return beta[i]; });
    sums.eps += lane_sum<A>(n, [&](int64_t i) { return eps[i]; });
  }

  CKPT_HD static const T* at(Strided<const void*> t, int64_t row, int64_t col) {
    return static_cast<const T*>(t.data) + row * t.stride + col;
  }
  CKPT_HD static T* at(Strided<void*> t, int64_t row, int64_t col) {
    return static_cast<T*>(t.data) + row * t.stride + col;
  }
  // Without dropout every element takes the draw that is always kept, with a scale of 1: that costs
  // a few per cent, and half the kernels.
  CKPT_HD static void keep_all(uint16_t* buffer) {
    for (int64_t i = 0; i < kActivationRun + 16; ++i) buffer[i] = 0xffff;
  }
};

// Calls f(kernel) with the ActivationKernel that the arguments ask for.
template <typename T, Activation kAct, bool kHasGated, typename F>
CKPT_HD void for_gate(const ActivationShape& a, F f) {
  if constexpr (kHasGated) {
    if (a.gated) return f(ActivationKernel<T, kAct, true>{});
  }
  f(ActivationKernel<T, kAct, false>{});
}

template <typename T, typename F>
CKPT_HD void for_activation(const ActivationShape& a, F f) {
  switch (a.act) {
#define CKPT_CASE(kind, gated) \
  case Activation::kind:       \
    return for_gate<T, Activation::kind, gated>(a, f);
    CKPT_FOR_ACTIVATIONS(CKPT_CASE)
#undef CKPT_CASE
  }
}

void activation_fwd(const ActivationFwd& a, int64_t begin, int64_t end) {
  for_type(a.dtype, [&](auto t) {
    for_activation<decltype(t)>(a, [&](auto kernel) { kernel.fwd(a, begin, end); });
  });
}

void activation_bwd(const ActivationBwd& a, int64_t begin, int64_t end) {
  for_type(a.dtype, [&](auto t) {
    for_activation<decltype(t)>(a, [&](auto kernel) { kernel.bwd(a, begin, end); });
  });
}

CKPT_END_TARGET
