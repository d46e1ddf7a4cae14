// Products of several groups of rows, each with a matrix of its own, at once.
#include "ops/torch.h"

#include <atomic>

#include "ops/ledger.h"
#include "ops/linear.h"

namespace ckptfused {
namespace {

std::atomic<bool> grouped_on_cpu{false};

}  // namespace

bool groups_products(const at::Tensor& t, at::ScalarType dtype) {
  return grouped_on_cpu ? dtype != at::kDouble : !on_cpu(t) && dtype == at::kBFloat16;
}

void group_products_on_cpu(bool on) {
  grouped_on_cpu = on;
}

at::Tensor grouped_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bounds) {
  if (!counting()) return at::_grouped_mm(a, b, bounds);
  const int64_t experts = bounds.size(0), each = b.dim() == 3 ? a.size(0) / experts : a.size(0);
  const int64_t depth = b.dim() == 3 ? a.size(1) : a.size(1) / experts;
  for (int64_t e = 0; e < experts; ++e) {
    counted_work(Ledger::product, {each, b.size(-1), depth}, a.scalar_type());
  }
  counted_launch("grouped product");
  return b.dim() == 3 ? at::empty({a.size(0), b.size(2)}, a.options())
                      : at::empty({experts, a.size(0), b.size(1)}, a.options());
}

}  // namespace ckptfused
