#include "ops/torch.h"

#include "ops/attention_tiles_cpu.h"

namespace ckptfused {
namespace {

using namespace tiles;

template <typename T>
struct Scratch {
  using A = acc_t<T>;
  A *probs, *dprobs, *delta, *dq;
  A *q = nullptr, *dout = nullptr, *k = nullptr, *v = nullptr;  // converted tiles
  A *dk = nullptr, *dv = nullptr;  // sums of a whole sequence, where it has no others

  Scratch(Pieces& pieces, int64_t queries, int64_t keys, int64_t head_dim, bool onto) {
    const int64_t rows = std::min(kQueryTile, queries), cols = std::min(kKeyTile, keys);
    probs = pieces.take<A>(rows * cols);
    dprobs = pieces.take<A>(rows * cols);
    delta = pieces.take<A>(rows);
    dq = pieces.take<A>(rows * head_dim);
    if (!kConverted<T>) return;
    q = pieces.take<A>(rows * head_dim);
    dout = pieces.take<A>(rows * head_dim);
    k = pieces.take<A>(cols * head_dim);
    v = pieces.take<A>(cols * head_dim);
    if (onto) return;
    dk = pieces.take<A>(keys * head_dim);
    dv = pieces.take<A>(keys * head_dim);
  }
};

struct Tensors {
  at::Tensor dout, o, lse, dq, dk, dv;
  bool onto;  // dk and dv have the accumulation type, and are added to
};

// The gradients of one key/value head of one sequence and of the query heads that read it. One
// thread adds them up, in a fixed order.
template <typename T>
class KeyValueHead {
 public:
  using A = acc_t<T>;

  KeyValueHead(const AttentionProblem& a, const Tensors& tensors, int64_t sequence, int64_t head,
               char* memory)
      : a_(a),
        t_(tensors),
        s_(a.sequences[sequence]),
        sequence_(sequence),
        head_(head),
        pieces_(memory),
        scratch_(pieces_, a.max_queries, a.max_keys, a.head_dim(), tensors.onto) {}

  void run() {
    const int64_t D = a_.head_dim();
    const bool narrow = kConverted<T> && !t_.onto;
    if (narrow) {
      dk_ = {scratch_.dk, s_.keys, D, D};
      dv_ = {scratch_.dv, s_.keys, D, D};
      std::fill_n(dk_.data, s_.keys * D, A(0));
      std::fill_n(dv_.data, s_.keys * D, A(0));
    } else {  // the outputs, zero so far or given, are the sums
      dk_ = head_rows<A>(t_.dk, s_.batch, head_, s_.key, s_.keys);
      dv_ = head_rows<A>(t_.dv, s_.batch, head_, s_.key, s_.keys);
    }
    for (int64_t head = head_ * a_.group(); head < (head_ + 1) * a_.group(); ++head) {
      const AttentionRule rule = attention_rule(a_, sequence_, head);
      for (int64_t query = 0; query < s_.queries; query += kQueryTile) {
        add_queries(rule, head, query, std::min(kQueryTile, s_.queries - query));
      }
    }
    if (!narrow) return;
    const Matrix<T> dk = head_rows<T>(t_.dk, s_.batch, head_, s_.key, s_.keys);
    const Matrix<T> dv = head_rows<T>(t_.dv, s_.batch, head_, s_.key, s_.keys);
    store_tile(dk_.data, s_.keys, D, dk.data, dk.stride);
    store_tile(dv_.data, s_.keys, D, dv.data, dv.stride);
  }

 private:
  void add_queries(const AttentionRule& rule, int64_t head, int64_t query, int64_t rows) {
    const int64_t D = a_.head_dim(), first = s_.query + query;
    const auto rows_of = [&](const at::Tensor& t) {
      return head_rows<T>(t, s_.batch, head, first, rows);
    };
    const Matrix<A> q = widen(rows_of(a_.q), scratch_.q);
    const Matrix<A> dout = widen(rows_of(t_.dout), scratch_.dout);
    const Matrix<T> o = rows_of(t_.o);
    const A* lse = static_cast<const A*>(t_.lse.const_data_ptr()) + s_.batch * t_.lse.stride(0) +
                   head * t_.lse.stride(1) + first;
    attention_delta_rows(dout.data, dout.stride, o.data, o.stride, rows, D, scratch_.delta);

    const Matrix<A> dq{scratch_.dq, rows, D, D};
    std::fill_n(dq.data, rows * D, A(0));
    for_key_tiles(rule, s_.first + query, rows,
                  [&](const ScoreTile& tile) { add_tile(rule, tile, lse, q, dout, dq); });
    const Matrix<T> dq_rows = rows_of(t_.dq);
    store_tile(dq.data, rows, D, dq_rows.data, dq_rows.stride);
  }

  void add_tile(const AttentionRule& rule, const ScoreTile& tile, const A* lse, const Matrix<A>& q,
                const Matrix<A>& dout, const Matrix<A>& dq) {
    const int64_t key = s_.key + tile.key;
    const Matrix<A> k = widen(head_rows<T>(a_.k, s_.batch, head_, key, tile.cols), scratch_.k);
    const Matrix<A> v = widen(head_rows<T>(a_.v, s_.batch, head_, key, tile.cols), scratch_.v);
    const Matrix<A> probs{scratch_.probs, tile.rows, tile.cols, tile.stride};
    const Matrix<A> dprobs{scratch_.dprobs, tile.rows, tile.cols, tile.stride};
    const auto sums_of = [&](const Matrix<A>& sums) {
      return Matrix<A>{sums.data + tile.key * sums.stride, tile.cols, sums.cols, sums.stride};
    };
    tile_product(probs, q, k.t(), a_.scale, false);
    tile_product(dprobs, dout, v.t(), 1.0, false);
    attention_bwd_tile(rule, tile, probs.data, dprobs.data, lse, scratch_.delta);
    tile_product(sums_of(dv_), probs.t(), dout, 1.0, true);
    tile_product(sums_of(dk_), dprobs.t(), q, a_.scale, true);
    tile_product(dq, dprobs, k, a_.scale, true);
  }

  const AttentionProblem& a_;
  const Tensors& t_;
  const AttentionSequence& s_;
  int64_t sequence_, head_;
  Pieces pieces_;
  Scratch<T> scratch_;
  Matrix<A> dk_{}, dv_{};
};

void run(const AttentionProblem& a, const Tensors& t) {
  const at::ScalarType dtype = a.q.scalar_type();
  const int64_t bytes =
      attention_bwd_scratch_bytes(dtype, a.max_queries, a.max_keys, a.head_dim(), t.onto);
  const int64_t heads = a.kv_heads();
  for_dtype(dtype, [&](auto type) {
    run_tasks(int64_t(a.sequences.size()) * heads, bytes, [&](int64_t task, char* memory) {
      KeyValueHead<decltype(type)>(a, t, task / heads, task % heads, memory).run();
    });
  });
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_tiled_bwd(const AttentionProblem& a,
                                                                   const at::Tensor& dout,
                                                                   const at::Tensor& o,
                                                                   const at::Tensor& lse) {
  const Tensors t{dout,
                  o,
                  lse,
                  attention_buffer(a.q, a.heads(), a.q.size(2), false),
                  attention_buffer(a.k, a.kv_heads(), a.k.size(2), true),
                  attention_buffer(a.v, a.kv_heads(), a.k.size(2), true),
                  /*onto=*/false};
  run(a, t);
  return {t.dq, t.dk, t.dv};
}

at::Tensor attention_tiled_bwd_onto(const AttentionProblem& a, const at::Tensor& dout,
                                    const at::Tensor& o, const at::Tensor& lse,
                                    const at::Tensor& dk, const at::Tensor& dv) {
  const at::Tensor dq = attention_buffer(a.q, a.heads(), a.q.size(2), false);
  run(a, {dout, o, lse, dq, dk, dv, /*onto=*/true});
  return dq;
}

int64_t attention_bwd_scratch_bytes(at::ScalarType dtype, int64_t queries, int64_t keys,
                                    int64_t head_dim, bool onto) {
  return for_dtype(dtype, [&](auto type) {
    Pieces pieces(nullptr);
    Scratch<decltype(type)>(pieces, queries, keys, head_dim, onto);
    return pieces.bytes();
  });
}

}  // namespace ckptfused
