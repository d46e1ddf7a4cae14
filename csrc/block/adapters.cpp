// Low-rank adapters beside the projections: which there are, and their part of forward and
// backward.
#include "ops/torch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "block/adapters_aten.h"
#include "block/block.h"
#include "math/dropout.h"
#include "ops/ledger.h"
#include "ops/linear.h"

namespace ckptfused {

using at::Tensor;

namespace {

// CKPTFUSED_ADAPTERS=aten: on the CPU too, what other devices do. For tests; read once.
bool through_aten(const Tensor& t) {
  static const bool forced = [] {
    const char* value = std::getenv("CKPTFUSED_ADAPTERS");
    return value != nullptr && std::strcmp(value, "aten") == 0;
  }();
  return forced || !on_cpu(t);
}

void count_product(const char* name, const Part& part, int64_t n, int64_t k, int64_t c,
                   int64_t rank) {
  const Ledger::Name named(name, part.weight);
  counted_work(Ledger::low_rank, {n, k, c, rank});
}

// The products of a forward.
void count(const Adapters& list, const Part& part, int64_t n, int64_t c) {
  if (!counting()) return;
  for (const Adapter& a : list) {
    count_product("adapter of", part, n, part.width, c, a.a.size(0));
  }
}

// Of a backward: t again for the gradient of b, that of t for those of a and of the input.
void count_gradients(const Adapters& list, const Part& part, int64_t n, int64_t c, bool din) {
  if (!counting()) return;
  for (const Adapter& a : list) {
    const int64_t k = part.width, rank = a.a.size(0);
    const bool da = a.da.defined(), db = a.db.defined();
    if (db) count_product("t of", part, n, 0, c, rank);
    if (db) count_product("d b of", part, n, k, 0, rank);
    if (da || din) count_product("d t of", part, n, k, 0, rank);
    if (da) count_product("d a of", part, n, 0, c, rank);
    if (din) count_product("d in of adapter of", part, n, 0, c, rank);
  }
}

// On the CPU one op does all of it; elsewhere it is PyTorch's products that launch.
void count_launch(const char* name, const Tensor& t) {
  if (counting() && !through_aten(t)) counted_launch(name);
}

}  // namespace

// The adapters of both halves with their slots, which follow the halves' own in the same order.
void Block::find_adapters() {
  int slot = int(params_.size() - adapter_params() - quantized_params());
  const auto add = [&](const std::vector<AdapterSpec>& list, int first) {
    for (const AdapterSpec& spec : list) {
      const int64_t site = kFirstAdapterSite + int64_t(adapters_.size());
      TORCH_CHECK(site < kDropoutSites, "ckptfused: expected at most ",
                  kDropoutSites - kFirstAdapterSite, " adapters in a block, got more");
      adapters_.push_back({&spec, first + spec.weight, slot, site});
      slot += kAdapterParams;
    }
  };
  if (spec_.has_attn) add(spec_.attn.lora, attn_slot(0));
  if (spec_.has_ffn) add(spec_.ffn.lora, ffn_slot(0));
}

size_t Block::adapter_params() const {
  const size_t attn = spec_.has_attn ? spec_.attn.lora.size() : 0;
  const size_t ffn = spec_.has_ffn ? spec_.ffn.lora.size() : 0;
  return kAdapterParams * (attn + ffn);
}

void Block::check_adapters() const {
  for (const AdapterSlots& s : adapters_) {
    const Tensor &a = params_[s.first + kA], &b = params_[s.first + kB];
    TORCH_CHECK(params_[s.weight].defined() && a.defined() && b.defined(),
                "ckptfused: an adapter of ", s.spec->target,
                " needs a, b and the weight beside it");
    const bool transposed = s.weight < ffn_slot(0) ? spec_.attn.transposed : spec_.ffn.transposed;
    const std::vector<int64_t> sizes = weight_sizes(s.weight);
    const int64_t into = sizes[transposed ? 0 : 1], out = sizes[transposed ? 1 : 0];
    const int64_t rank = s.spec->rank;
    TORCH_CHECK(
        a.sizes() == at::IntArrayRef({rank, into}) && b.sizes() == at::IntArrayRef({out, rank}),
        "ckptfused: expected a ", at::IntArrayRef({rank, into}), " and b ",
        at::IntArrayRef({out, rank}), " of the adapter of ", s.spec->target, ", got ", a.sizes(),
        " and ", b.sizes());
  }
}

// As autocast does it: where the products have a compute type of their own, adapters have it, too.
Tensor Block::adapter_param(int slot) {
  return spec_.compute == at::ScalarType::Undefined ? params_[slot] : weight(slot);
}

// Where an adapter's gradient is added up, over tiles and parts.
Tensor Block::adapter_grad(int slot) {
  if (!need(slot)) return {};
  if (!grads_[slot].defined()) {
    grads_[slot] = empty(params_[slot].sizes(), A_, "d", slot);
    grads_[slot].zero_();
  }
  return grads_[slot];
}

// Whether the adapters of a part are made of half-precision products with float32 sums, on devices
// that have them. A pure function of these, so that a replay makes the bits again.
bool Block::adapters_in_halves(const Tensor& like, const Part& part) {
  if (!is_half(P_) || !through_aten(like)) return false;
  const auto beside = [&](const AdapterSlots& s) { return s.weight == part.weight; };
  return std::any_of(adapters_.begin(), adapters_.end(), beside) &&
         (counting() || like.is_cpu() || widens(like));
}

// The numbers of all wider adapters as two of half precision, in a few kernels for all of them.
void Block::split_adapters() {
  if (!adapter_places_.empty()) return;
  std::vector<Tensor> wide;
  int64_t numbers = 0;
  for (const AdapterSlots& s : adapters_) {
    for (const int part : {kA, kB}) {
      const Tensor t = adapter_param(s.first + part);
      const bool exact = t.scalar_type() == P_;
      adapter_places_.push_back(exact ? -1 : numbers);
      if (exact) continue;
      wide.push_back(t.reshape({-1}));
      numbers += t.numel();
    }
  }
  if (wide.empty()) return;
  const Ledger::Name name("adapters in halves");
  adapter_halves_ = empty({2, numbers}, P_, "adapters in halves");
  split_into(at::cat(wide), adapter_halves_[0], adapter_halves_[1]);
}

// The adapters of a part, on the columns [col0, col0 + width) of their input.
Adapters Block::adapters_of(const Part& part, int64_t col0, int64_t width, AdapterUse use,
                            const Tensor& like) {
  Adapters list;
  const bool halves = adapters_in_halves(like, part);
  if (halves) split_adapters();
  // Of slot a or b: the numbers as they are, or one of their halves, undefined where it is nothing.
  const auto numbers = [&](size_t adapter, int slot, int half) {
    const Tensor t = adapter_param(adapters_[adapter].first + slot);
    const int64_t place = halves ? adapter_places_[2 * adapter + slot] : -1;
    if (place < 0) return half == 0 ? t : Tensor();
    return adapter_halves_[half].narrow(0, place, t.numel()).view(t.sizes());
  };
  for (size_t i = 0; i < adapters_.size(); ++i) {
    const AdapterSlots& s = adapters_[i];
    if (s.weight != part.weight) continue;
    const auto columns = [&](const Tensor& a) {
      return a.defined() ? a.narrow(1, col0, width) : a;
    };
    const auto rows = [&](const Tensor& b) {
      return b.defined() ? b.narrow(0, part.row0, part.width) : b;
    };
    Adapter adapter{
        columns(numbers(i, kA, 0)), rows(numbers(i, kB, 0)), {}, s.spec->scale, s.spec->p, s.site};
    if (use == AdapterUse::all_grads) {
      adapter.da = columns(adapter_grad(s.first + kA));
      adapter.db = rows(adapter_grad(s.first + kB));
      // Of the tiles of a cut input, one adds the bias's share.
      if (col0 == 0) adapter.dbias = rows(adapter_grad(s.first + kBias));
    } else if (use == AdapterUse::forward) {
      adapter.bias = rows(adapter_param(s.first + kBias));
    }
    if (halves) {
      adapter.halves = true;
      adapter.a_rest = columns(numbers(i, kA, 1));
      adapter.b_rest = rows(numbers(i, kB, 1));
    }
    list.push_back(std::move(adapter));
  }
  return list;
}

void Block::add_adapters(const Tensor& out, const Tensor& in, const Part& part, int64_t row0) {
  const int64_t width = in.size(1);
  const Adapters list = adapters_of(part, 0, width, AdapterUse::forward, out);
  if (list.empty()) return;
  count(list, part, in.size(0), width);
  count_launch("adapters_fwd", out);
  const AdapterPlace place{row0, 0, width, row_map(), rng_};
  (through_aten(out) ? adapters_fwd_aten : adapters_fwd_cpu)(out, in, list, place);
}

// in: undefined where only din is wanted, which may be undefined where only gradients of parameters
// are. cols: the width of the whole input.
void Block::adapters_backward(const Tensor& dout, const Tensor& in, const Part& part,
                              const Tensor& din, int64_t row0, int64_t col0, int64_t cols) {
  if (adapters_.empty()) return;
  const int64_t width = (in.defined() ? in : din).size(1);
  const AdapterUse use = in.defined() ? AdapterUse::all_grads : AdapterUse::input_grad;
  Adapters list = adapters_of(part, col0, width, use, dout);
  if (!din.defined()) {
    const auto idle = [](const Adapter& a) {
      return !a.da.defined() && !a.db.defined() && !a.dbias.defined();
    };
    list.erase(std::remove_if(list.begin(), list.end(), idle), list.end());
  }
  if (list.empty()) return;
  count_gradients(list, part, dout.size(0), width, din.defined());
  count_launch("adapters_bwd", dout);
  const AdapterPlace place{row0, col0, cols, row_map(), rng_};
  (through_aten(dout) ? adapters_bwd_aten : adapters_bwd_cpu)(dout, in, din, list, place);
}

}  // namespace ckptfused
