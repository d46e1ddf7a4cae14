#include "ops/torch.h"

#include "ops/attention.h"

#include <algorithm>

#include "ops/row_args.h"

namespace ckptfused {
namespace {

MaskKind parse_mask_kind(const char* op, const char* name, std::string_view kind,
                         const OptionalTensor& mask, at::Device device) {
  if (!given(mask)) {
    TORCH_CHECK(kind == "none", op, ": ", name, ": expected a tensor for kind ", kind,
                ", got none");
    return MaskKind::none;
  }
  TORCH_CHECK(kind == "keep" || kind == "drop" || kind == "add", op, ": ", name, "_kind: expected ",
              "keep, drop or add, got ", kind);
  TORCH_CHECK(mask->device() == device, op, ": ", name, ": expected a tensor on ", device,
              ", got one on ", mask->device());
  check_memory(op, name, *mask);
  if (kind == "add") {
    kernel_dtype(op, name, *mask);
    return MaskKind::add;
  }
  TORCH_CHECK(mask->scalar_type() == at::kBool, op, ": ", name, ": expected Bool for kind ", kind,
              ", got ", mask->scalar_type());
  return kind == "keep" ? MaskKind::keep : MaskKind::drop;
}

at::Tensor expand_mask(const char* op, const char* name, const OptionalTensor& mask,
                       at::IntArrayRef sizes) {
  if (!given(mask)) return {};
  bool fits = mask->dim() <= int64_t(sizes.size());
  for (int64_t i = 1; fits && i <= mask->dim(); ++i) {
    fits = mask->size(-i) == 1 || mask->size(-i) == sizes[sizes.size() - i];
  }
  TORCH_CHECK(fits, op, ": ", name, ": expected a shape that broadcasts to ", sizes, ", got ",
              mask->sizes());
  return mask->expand(sizes);
}

// Queries of a batch that a call is of, whose first sequence has that number.
struct Queries {
  int64_t sequence, first, count, all;
};

Queries queries_of(const char* op, const at::Tensor& q, const at::Tensor& k, QueryTile tile) {
  const int64_t count = q.size(2);
  if (tile.empty()) return {0, 0, count, count};
  const bool fits = tile.size() == 3 && tile[0] >= 0 && tile[1] >= 0 && tile[1] + count <= tile[2];
  TORCH_CHECK(fits && tile[2] == k.size(2), op, ": tile: expected [sequence, query, queries] with ",
              "query + ", count, " of at most queries, which are as many as the keys, ", k.size(2),
              ", got ", tile);
  return {tile[0], tile[1], count, tile[2]};
}

void set_dense_sequences(AttentionProblem& a, const Queries& queries) {
  a.max_queries = queries.all;
  a.max_keys = a.k.size(2);
  for (int64_t b = 0; b < a.batch(); ++b) {
    a.sequences.push_back(
        {b, 0, queries.count, 0, a.max_keys, queries.sequence + b, queries.first});
  }
}

void set_packed_sequences(const char* op, AttentionProblem& a, const at::Tensor& cu_seqlens,
                          const Queries& queries) {
  const int64_t tokens = queries.all;
  TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1 &&
                  (cu_seqlens.scalar_type() == at::kInt || cu_seqlens.scalar_type() == at::kLong),
              op, ": cu_seqlens: expected Int or Long [S + 1], got ", cu_seqlens.scalar_type(), " ",
              cu_seqlens.sizes());
  TORCH_CHECK(a.batch() == 1 && a.k.size(2) == tokens, op,
              ": cu_seqlens: expected q, k and v of one packed batch [1, heads, N, D], got q ",
              a.q.sizes(), " and k ", a.k.sizes());
  check_memory(op, "cu_seqlens", cu_seqlens);
  const at::Tensor bounds = cu_seqlens.to(at::kCPU, at::kLong).contiguous();
  const int64_t* bound = bounds.const_data_ptr<int64_t>();
  const int64_t last = bounds.numel() - 1;
  TORCH_CHECK(bound[0] == 0 && bound[last] == tokens, op,
              ": cu_seqlens: expected numbers that do not fall, from 0 to ", tokens, ", got ",
              bound[0], " first and ", bound[last], " last");
  for (int64_t s = 0; s < last; ++s) {
    TORCH_CHECK(bound[s] <= bound[s + 1], op,
                ": cu_seqlens: expected numbers that do not fall, from 0 to ", tokens, ", got ",
                bound[s], " then ", bound[s + 1], " at ", s);
    const int64_t length = bound[s + 1] - bound[s];
    a.max_queries = a.max_keys = std::max(a.max_keys, length);
    const int64_t begin = std::max(bound[s], queries.first);
    const int64_t end = std::min(bound[s + 1], queries.first + queries.count);
    if (end < begin) continue;
    a.sequences.push_back(
        {0, begin - queries.first, end - begin, bound[s], length, s, begin - bound[s]});
  }
}

void check_operands(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && q.size(0) == k.size(0) && q.size(3) == k.size(3) &&
                  k.size(1) > 0 && q.size(1) % k.size(1) == 0 && k.sizes() == v.sizes(),
              op, ": expected q [B, H, T, D] and k, v [B, G, T, D] with H a multiple of G, got q ",
              q.sizes(), ", k ", k.sizes(), ", v ", v.sizes());
  kernel_dtype(op, "q", q);
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), op,
              ": expected q, k and v of one dtype, got ", q.scalar_type(), ", ", k.scalar_type(),
              ", ", v.scalar_type());
  TORCH_CHECK(k.device() == q.device() && v.device() == q.device(), op,
              ": expected q, k and v on one device, got ", q.device(), ", ", k.device(), ", ",
              v.device());
  check_memory(op, "q", q);
  check_memory(op, "k", k);
  check_memory(op, "v", v);
}

}  // namespace

AttentionProblem attention_problem(const char* op, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const OptionalTensor& mask,
                                   const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
                                   const OptionalTensor& rng_state, std::string_view mask_kind,
                                   std::string_view padding_kind, double scale, bool causal,
                                   int64_t window, double softcap, double p, QueryTile tile) {
  check_operands(op, q, k, v);
  const Queries queries = queries_of(op, q, k, tile);
  TORCH_CHECK(window >= 0, op, ": window: expected 0 (none) or more, got ", window);
  TORCH_CHECK(softcap >= 0.0, op, ": softcap: expected 0 (none) or more, got ", softcap);
  AttentionProblem a;
  a.q = attention_operand(q);
  a.k = attention_operand(k);
  a.v = attention_operand(v);
  const int64_t batch = a.batch(), keys = k.size(2);
  a.mask_kind = parse_mask_kind(op, "mask", mask_kind, mask, q.device());
  a.padding_kind = parse_mask_kind(op, "padding", padding_kind, padding, q.device());
  a.mask = expand_mask(op, "mask", mask, {batch, a.heads(), queries.all, keys});
  a.padding = expand_mask(op, "padding", padding, {batch, keys});
  a.scale = scale;
  a.causal = causal;
  a.softcap = softcap;
  a.packed = given(cu_seqlens);
  TORCH_CHECK(
      !a.packed || (a.mask_kind == MaskKind::none && a.padding_kind == MaskKind::none), op,
      ": mask, padding: expected none beside cu_seqlens, which bounds the sequences itself, ",
      "got kinds ", mask_kind, " and ", padding_kind);
  a.packed ? set_packed_sequences(op, a, *cu_seqlens, queries) : set_dense_sequences(a, queries);
  a.window = window >= std::max(a.max_queries, a.max_keys) ? 0 : window;
  a.dropout = host_dropout(op, rng_state, p, int64_t(DropoutSite::attention_probs), a.max_keys);
  return a;
}

AttentionResult attention_result(const char* op, const AttentionProblem& a, const at::Tensor& dout,
                                 const at::Tensor& o, const at::Tensor& lse) {
  const at::Tensor& q = a.q;
  for (const auto& [name, t] : {std::pair("do", dout), std::pair("o", o)}) {
    TORCH_CHECK(
        t.sizes() == q.sizes() && t.scalar_type() == q.scalar_type() && t.device() == q.device(),
        op, ": ", name, ": expected one like q, ", q.scalar_type(), " ", q.sizes(), " on ",
        q.device(), ", got ", t.scalar_type(), " ", t.sizes(), " on ", t.device());
    check_memory(op, name, t);
  }
  check_memory(op, "lse", lse);
  const at::Tensor rows = lse.contiguous();
  check_tensor(op, "lse", rows, q.sizes().slice(0, 3), acc_dtype(q.scalar_type()), q.device());
  return {attention_operand(dout), attention_operand(o), rows};
}

at::Tensor attention_operand(const at::Tensor& t) {
  const bool rows = t.size(3) <= 1 || t.stride(3) == 1;
  const bool apart = t.size(2) <= 1 || t.stride(2) >= t.size(3);
  return rows && apart ? t : t.contiguous();
}

at::Tensor attention_buffer(const at::Tensor& like, int64_t heads, int64_t tokens, bool zeroed) {
  const std::vector<int64_t> memory = {like.size(0), tokens, heads, like.size(3)};
  at::Tensor buffer = at::empty(memory, like.options());
  if (zeroed) buffer.zero_();
  return buffer.transpose(1, 2);
}

}  // namespace ckptfused
