// Attention of a tile of queries: on the CPU by our own tiles, on a GPU by PyTorch's flash kernel.
#include "ops/torch.h"

#include <algorithm>
#include <utility>

#include "ops/attention_gpu.h"
#include "ops/attention_tiles_cpu.h"
#include "ops/ledger.h"

namespace ckptfused {
namespace {

using at::Tensor;

constexpr AttentionKernel kFlash = AttentionKernel::flash;

AttentionGpu (*gpu_of)(at::Device) = nullptr;

// What the work on x is for; an H100 where no GPU is at hand.
AttentionGpu gpu_for(const Tensor& x) {
  const std::optional<Tensor> there = like_there(x);
  const bool at_hand = gpu_of != nullptr && there.has_value() && there->is_cuda();
  return at_hand ? gpu_of(there->device()) : AttentionGpu{9, 0, 0};
}

// While a ledger is open: the work of a tile of queries.
void count_tile(const char* what, const AttentionProblem& a, int64_t products, const char* launched,
                int64_t launches) {
  const Ledger::Name name(what);
  counted_work(Ledger::attention,
               {a.batch(), a.heads(), a.q.size(2), a.head_dim(), products, a.k.size(2)},
               a.q.scalar_type());
  counted_launch(launched, 0, launches);
}

// t: a sum of gradients, one for each value of `of`.
void check_sum(const char* op, const char* name, const Tensor& t, const Tensor& of) {
  const at::ScalarType acc = acc_dtype(of.scalar_type());
  TORCH_CHECK(t.sizes() == of.sizes() && t.scalar_type() == acc && t.device() == of.device() &&
                  (t.size(3) <= 1 || t.stride(3) == 1),
              op, ": ", name, ": expected ", acc, " ", of.sizes(), " on ", of.device(),
              " with contiguous rows, got ", t.scalar_type(), " ", t.sizes(), " strides ",
              t.strides(), " on ", t.device());
  check_memory(op, name, t);
}

// Of a tile that flash makes: it lays the last query on the last key, and so is given the keys up
// to the tile's end where later ones are hidden.
int64_t keys_for_flash(const char* op, const AttentionProblem& a, QueryTile tile) {
  const AttentionShape shape = a.shape();
  TORCH_CHECK(shape.plain(), op, ": on a GPU PyTorch's flash kernel makes tiles of queries, with ",
              shape.missing());
  return a.causal ? tile[1] + a.q.size(2) : a.k.size(2);
}

std::tuple<Tensor, Tensor> flash_fwd(const AttentionProblem& a, const Tensor& k, const Tensor& v) {
  if (!counting()) return attention_aten_fwd(kFlash, a.q, k, v, a.scale, a.causal);
  return {attention_buffer(a.q, a.heads(), a.q.size(2), false),
          at::empty(a.q.sizes().slice(0, 3), a.q.options().dtype(acc_dtype(a.q.scalar_type())))};
}

std::tuple<Tensor, Tensor, Tensor> flash_bwd(const AttentionProblem& a, const AttentionResult& r,
                                             const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!counting()) {
    return attention_aten_bwd(kFlash, r.dout, q, k, v, r.o, r.lse, a.scale, a.causal);
  }
  const auto like = [](const Tensor& t) {
    return attention_buffer(t, t.size(1), t.size(2), false);
  };
  std::tuple<Tensor, Tensor, Tensor> grads = {like(q), like(k), like(v)};
  const Ledger::Name name("scratch of attention");
  const FlashSizes sizes{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3)};
  at::empty({flash_gpu_scratch(sizes, counted_multiprocessors())}, q.options().dtype(at::kByte));
  return grads;
}

}  // namespace

void set_gpu_of(AttentionGpu (*known)(at::Device)) {
  gpu_of = known;
}

bool has_tiles_on_gpu(const AttentionShape& shape, const Tensor& x) {
  const std::string_view wanted = attention_override();
  return at::globalContext().userEnabledFlashSDP() &&
         attention_kernel(shape, gpu_for(x), wanted.empty() ? "flash" : wanted) == kFlash;
}

int64_t flash_gpu_scratch(const FlashSizes& s, int64_t multiprocessors) {
  const auto up = [](int64_t size, int64_t step) { return (size + step - 1) / step * step; };
  const at::Context& context = at::globalContext();
  const bool repeatable =
      context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
  const int64_t heads = std::max<int64_t>(s.batch * s.heads, 1);
  const int64_t copies = repeatable ? (multiprocessors + heads - 1) / heads : 1;
  const int64_t entries = up(s.head_dim, s.head_dim <= 128 ? 32 : 64);
  const int64_t sums = 4 * s.batch * s.heads * up(s.queries, 128) * (copies * entries + 1);
  const int64_t by_query_head = 2 * 2 * s.batch * s.keys * s.heads * s.head_dim;  // half precision
  return sums + (s.kv_heads != s.heads ? by_query_head : 0);
}

std::tuple<Tensor, Tensor> attention_tile_fwd_gpu(const AttentionProblem& a, QueryTile tile) {
  const char* op = "attention_tile_fwd";
  const int64_t keys = keys_for_flash(op, a, tile);
  count_tile("attention", a, 2, op, 1);
  return flash_fwd(a, a.k.narrow(2, 0, keys), a.v.narrow(2, 0, keys));
}

// One query head of each group at a time: of all at once the kernel makes gradients of k and v by
// query head, over all keys.
Tensor attention_tile_bwd_gpu(const AttentionProblem& a, const AttentionResult& result,
                              const Tensor& dk, const Tensor& dv, QueryTile tile) {
  const char* op = "attention_tile_bwd";
  const int64_t keys = keys_for_flash(op, a, tile), group = a.group();
  count_tile("attention backward", a, 5, op, 3 * group);
  const Tensor k = a.k.narrow(2, 0, keys), v = a.v.narrow(2, 0, keys);
  const Tensor dq = attention_buffer(a.q, a.heads(), a.q.size(2), false);
  for (int64_t first = 0; first < group; ++first) {
    const auto own = [&](const Tensor& t) { return t.slice(1, first, t.size(1), group); };
    // As flash would copy them.
    const AttentionResult part{attention_rows(own(result.dout)), attention_rows(own(result.o)),
                               own(result.lse).contiguous()};
    const auto [dq_part, dk_part, dv_part] = flash_bwd(a, part, own(a.q), k, v);
    own(dq).copy_(dq_part);
    dk.narrow(2, 0, keys).add_(dk_part);
    dv.narrow(2, 0, keys).add_(dv_part);
  }
  return dq;
}

std::tuple<Tensor, Tensor> attention_tile_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
    const OptionalTensor& padding, const OptionalTensor& cu_seqlens,
    const OptionalTensor& rng_state, std::string_view mask_kind, std::string_view padding_kind,
    double scale, bool causal, int64_t window, double softcap, double p, QueryTile tile) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const char* op = "attention_tile_fwd";
  const AttentionProblem a =
      attention_problem(op, q, k, v, mask, padding, cu_seqlens, rng_state, mask_kind, padding_kind,
                        scale, causal, window, softcap, p, tile);
  if (!on_cpu(q)) return attention_tile_fwd_gpu(a, tile);
  count_tile("attention", a, 2, "tiled attention", 1);
  return attention_tiled_fwd(a);
}

Tensor attention_tile_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Tensor& o, const Tensor& lse, const Tensor& dk, const Tensor& dv,
                          const OptionalTensor& mask, const OptionalTensor& padding,
                          const OptionalTensor& cu_seqlens, const OptionalTensor& rng_state,
                          std::string_view mask_kind, std::string_view padding_kind, double scale,
                          bool causal, int64_t window, double softcap, double p, QueryTile tile) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const char* op = "attention_tile_bwd";
  const AttentionProblem a =
      attention_problem(op, q, k, v, mask, padding, cu_seqlens, rng_state, mask_kind, padding_kind,
                        scale, causal, window, softcap, p, tile);
  const AttentionResult result = attention_result(op, a, dout, o, lse);
  check_sum(op, "dk", dk, k);
  check_sum(op, "dv", dv, v);
  if (!on_cpu(q)) return attention_tile_bwd_gpu(a, result, dk, dv, tile);
  count_tile("attention backward", a, 5, "tiled attention", 1);
  return attention_tiled_bwd_onto(a, result.dout, result.o, result.lse, dk, dv);
}

TORCH_LIBRARY_IMPL(ckptfused, CPU, m) {
  m.impl("attention_tile_fwd", &attention_tile_fwd);
  m.impl("attention_tile_bwd", &attention_tile_bwd);
}

TORCH_LIBRARY_IMPL(ckptfused, CUDA, m) {
  m.impl("attention_tile_fwd", &attention_tile_fwd);
  m.impl("attention_tile_bwd", &attention_tile_bwd);
}

}  // namespace ckptfused
