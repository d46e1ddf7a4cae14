#include "ops/column_sums.h"

#include "ops/ledger.h"

#include <algorithm>

namespace ckptfused {
namespace {

// Bytes of a part's copy: it stays in a core's cache.
constexpr int64_t kCopy = 1 << 20;

}  // namespace

void column_sums_out(at::Tensor sum, const at::Tensor& in, bool add) {
  const at::ScalarType acc = sum.scalar_type();
  const int64_t n = in.size(0), row = std::max<int64_t>(sum.nbytes(), 1);
  const bool copied = on_cpu(in) && acc != in.scalar_type();
  const int64_t rows = copied ? std::clamp<int64_t>(kCopy / row, 1, std::max<int64_t>(n, 1)) : n;
  at::Tensor copy;
  if (copied) {
    const Ledger::Name name("float32 rows");
    copy = at::empty({std::min(rows, n), in.size(1)}, sum.options());
  }
  if (counting()) {  // PyTorch's own on meta tensors is slow Python
    const bool added = add || rows < n;
    const at::Tensor part = added ? at::empty_like(sum) : sum;
    counted_launch("aten::sum", int64_t(in.nbytes() + part.nbytes()));
    if (added) counted_launch("aten::add_", 3 * int64_t(part.nbytes()));
    return;
  }
  const auto part_of = [&](int64_t row0) {
    const at::Tensor part = in.narrow(0, row0, std::min(rows, n - row0));
    return copied ? copy.narrow(0, 0, part.size(0)).copy_(part) : part;
  };
  if (!add) at::sum_out(sum, part_of(0), {0}, false, acc);
  for (int64_t row0 = add ? 0 : rows; row0 < n; row0 += rows) {
    sum.add_(part_of(row0).sum({0}, false, acc));
  }
}

}  // namespace ckptfused
