// The output gate: o times the sigmoid of a projection of n1, of which the raw product holds the
// columns. It is a gated unit, so the FFN's kernels make it.
#include "ops/torch.h"

#include "block/block.h"

namespace ckptfused {

using at::Tensor;

namespace {

constexpr const char* kUnit = "glu";

}  // namespace

// The gate's columns of a buffer as wide as the raw product: [N, H, D], or [N, H, 1] by head.
Tensor Block::gate_view(const Tensor& buffer) const {
  const HeadColumns columns = spec_.attn.gate_columns();
  const int64_t width = spec_.attn.gate_width() / columns.count;
  return buffer.as_strided({N_, columns.count, width}, {buffer.stride(0), columns.stride, 1},
                           buffer.storage_offset() + columns.col0);
}

// What the sigmoid is of, for each entry of o: where these columns lie side by side, a view.
Tensor Block::gate_rows() const {
  const AttentionSpec& a = spec_.attn;
  const HeadColumns columns = a.gate_columns();
  if (columns.stride == a.head_dim) return value_.qkv.narrow(1, columns.col0, a.q_width());
  const Tensor rows = empty({N_, a.q_width()}, P_, "gate");
  const Tensor given = gate_view(value_.qkv);
  if (!counted_launch("aten::copy_", 2 * int64_t(rows.nbytes()))) {
    rows.view({N_, a.heads, a.head_dim}).copy_(given);
  }
  return rows;
}

// o behind its gate, as the rows that the projection multiplies; over o where nobody reads it
// again.
Tensor Block::gated_rows() {
  if (!value_.qkv.defined()) ensure_qkv();
  const Tensor gate = gate_rows(), o = o_rows();
  const bool read_again = backward_ || (save_ && spec_.keep.attn);
  const bool ours = !read_again || !o.is_alias_of(value_.o);
  const Tensor gated = ours ? o : empty(o.sizes(), P_, "gated o");
  call::activation_fwd(gate, o, {}, gated, kUnit, 0, 0, spec_.attn.q_width(), 0, 0, {});
  if (!backward_) release_qkv();
  return gated;
}

// Makes the gradient of o of the gated one's, and returns that of the gate of each entry. memory:
// as many entries, which it takes.
Tensor Block::gate_backward(const Tensor& d_o, const Tensor& memory) const {
  call::activation_bwd(gate_rows(), o_rows(), d_o, {}, {}, memory, d_o, kUnit, 0, 0,
                       spec_.attn.q_width(), 0, 0, {});
  return memory;
}

// The gradient of the gate's columns, of that of the gate of each entry.
void Block::gate_grad_out(const Tensor& dqkv, const Tensor& d_gate) const {
  const AttentionSpec& a = spec_.attn;
  Tensor columns = gate_view(dqkv);
  const Tensor heads = d_gate.view({N_, a.heads, a.head_dim});
  const int64_t bytes = int64_t(d_gate.nbytes() + columns.nbytes());
  if (counted_launch(a.gated_by_head() ? "aten::sum" : "aten::copy_", bytes)) return;
  if (a.gated_by_head()) {
    at::sum_out(columns, heads, at::IntArrayRef{2}, /*keepdim=*/true);
  } else {
    columns.copy_(heads);
  }
}

}  // namespace ckptfused
