#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "math/norm.h"

namespace ckptfused {

// One row of a norm and its gradients by their definitions, in double precision.
struct NaiveNorm {
  std::vector<double> xhat;
  double rstd = 1;
  bool centred = false, stats = false;

  NaiveNorm(NormKind kind, const std::vector<double>& x, double eps) : xhat(x) {
    stats = norm_has_stats(kind);
    if (!stats) return;
    const double n = double(x.size());
    double mean = 0, variance = 0;
    centred = kind == NormKind::layernorm;
    if (centred) {
      for (const double v : x) mean += v / n;
    }
    for (const double v : x) variance += (v - mean) * (v - mean) / n;
    rstd = 1 / std::sqrt(variance + eps);
    for (double& v : xhat) v = (v - mean) * rstd;
  }

  std::vector<double> forward(const std::vector<double>& w, const std::vector<double>& b) const {
    std::vector<double> y(xhat.size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = xhat[i] * w[i] + (b.empty() ? 0 : b[i]);
    return y;
  }

  // dx_j = sum_i dy_i w_i dxhat_i/dx_j with the Jacobian written out.
  std::vector<double> backward(const std::vector<double>& dy, const std::vector<double>& w) const {
    const double n = double(xhat.size());
    std::vector<double> dx(xhat.size(), 0.0);
    for (size_t j = 0; j < dx.size(); ++j) {
      for (size_t i = 0; i < dx.size(); ++i) {
        const double jacobian =
            rstd * ((i == j ? 1 : 0) - (centred ? 1 / n : 0) - (stats ? xhat[i] * xhat[j] / n : 0));
        dx[j] += dy[i] * w[i] * jacobian;
      }
    }
    return dx;
  }
};

// How large intermediate values of xhat get before the mean is taken off.
inline double norm_scale(const NaiveNorm& norm, double largest_x) {
  return 1 + largest_x * norm.rstd;
}

}  // namespace ckptfused
