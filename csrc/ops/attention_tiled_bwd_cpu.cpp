#include "ops/torch.h"

#include "ops/attention_tiles_cpu.h"

namespace ckptfused {
namespace {

using namespace tiles;

struct Tensors {
  at::Tensor dout, o, lse, dq, dk, dv;
  bool onto = false;  // dk and dv have the accumulation type, and are added to
};

// Scratch of one thread. C: the type that is multiplied.
template <typename T, typename C>
struct Scratch {
  using A = acc_t<T>;
  static constexpr bool kRounded = !std::is_same_v<A, C>;
  A *probs, *dprobs, *delta, *dk_run, *dv_run;
  A *dq = nullptr, *dk = nullptr, *dv = nullptr;  // sums of a sequence, where outputs are narrower
  C *q, *dout, *q_t, *dout_t, *k, *k_t, *v_t;
  BackwardOperands<C> operands;

  Scratch(Pieces& pieces, const TileSizes& s, bool onto) {
    const int64_t D = s.head_dim, depth = s.depth<C>(), run = run_of(s), tile = s.rows * s.cols;
    probs = pieces.take<A>(std::max(tile, D));
    dprobs = pieces.take<A>(tile);
    delta = pieces.take<A>(s.queries);
    dk_run = pieces.take<A>(D * run);
    dv_run = pieces.take<A>(D * run);
    q = pieces.take<C>(s.rows * depth);
    dout = pieces.take<C>(s.rows * depth);
    q_t = pieces.take<C>(D * s.rows);
    dout_t = pieces.take<C>(D * s.rows);
    k = pieces.take<C>(run * D);
    k_t = pieces.take<C>(depth * run);
    v_t = pieces.take<C>(depth * run);
    if constexpr (kRounded) {
      operands = {pieces.take<C>(tile), pieces.take<C>(tile), pieces.take<C>(tile)};
    } else {
      operands = {probs, dprobs, dprobs};
    }
    if (!kConverted<T>) return;
    dq = pieces.take<A>(filled_rows(s.queries) * D);
    if (onto || s.group == 1) return;
    dk = pieces.take<A>(s.keys * D);
    dv = pieces.take<A>(s.keys * D);
  }

  // Keys whose operands and sums are held at a time.
  static int64_t run_of(const TileSizes& s) { return std::min(kKeyRun, filled_cols(s.keys)); }
};

// The gradients of one key/value head of one sequence and of the query heads that read it. One
// thread adds them up, in a fixed order: by head, by run of keys, by tile of queries.
template <typename T, typename C>
class KeyValueHead {
 public:
  using A = acc_t<T>;

  KeyValueHead(const AttentionProblem& a, const TileSizes& sizes, const Tensors& tensors,
               int64_t sequence, int64_t head, char* memory)
      : a_(a),
        sizes_(sizes),
        t_(tensors),
        s_(a.sequences[sequence]),
        sequence_(sequence),
        head_(head),
        pieces_(memory),
        scratch_(pieces_, sizes, tensors.onto) {}

  void run() {
    const bool summed = t_.onto || a_.group() > 1, narrow = kConverted<T> && !t_.onto;
    if (summed && narrow) {
      dk_ = cleared(scratch_.dk, s_.keys);
      dv_ = cleared(scratch_.dv, s_.keys);
    } else if (summed) {  // the outputs, zero so far or given, are the sums
      dk_ = head_rows<A>(t_.dk, s_.batch, head_, s_.key);
      dv_ = head_rows<A>(t_.dv, s_.batch, head_, s_.key);
    }
    for (int64_t head = head_ * a_.group(); head < (head_ + 1) * a_.group(); ++head) {
      add_head(head, attention_rule(a_, sequence_, head));
    }
    if (summed && narrow) {
      store(dk_, s_.keys, t_.dk, head_, s_.key);
      store(dv_, s_.keys, t_.dv, head_, s_.key);
    }
    end_products<C>();
  }

 private:
  HeadRows<A> cleared(A* sums, int64_t rows) const {
    std::fill_n(sums, rows * sizes_.head_dim, A(0));
    return {sums, sizes_.head_dim};
  }
  void store(const HeadRows<A>& sums, int64_t rows, const at::Tensor& t, int64_t head,
             int64_t row) {
    const HeadRows<T> out = head_rows<T>(t, s_.batch, head, row);
    store_tile(sums.data, sums.stride, rows, sizes_.head_dim, out.data, out.stride);
  }

  void add_head(int64_t head, const AttentionRule& rule) {
    dq_ = kConverted<T> ? cleared(scratch_.dq, filled_rows(s_.queries))
                        : head_rows<A>(t_.dq, s_.batch, head, s_.query);
    const HeadRows<T> dout = head_rows<T>(t_.dout, s_.batch, head, s_.query);
    const HeadRows<T> o = head_rows<T>(t_.o, s_.batch, head, s_.query);
    attention_delta_rows(dout.data, dout.stride, o.data, o.stride, s_.queries, sizes_.head_dim,
                         scratch_.delta);
    for (int64_t key = 0; key < s_.keys; key += kKeyRun) add_keys(head, rule, key);
    if (kConverted<T>) store(dq_, s_.queries, t_.dq, head, s_.query);
  }

  // A tile of keys of a run: where its operands and sums begin, each in one piece, and how many of
  // its columns have gradients so far.
  struct KeyTile {
    int64_t key = 0, keys = 0, at = 0;
    int64_t cols = filled_cols(keys), begun = 0;
  };

  // Keys [first, first + kKeyRun) of one head.
  void add_keys(int64_t head, const AttentionRule& rule, int64_t first) {
    const int64_t end = std::min(first + kKeyRun, s_.keys);
    const int64_t count = (end - first + kKeyTile - 1) / kKeyTile;
    for (int64_t i = 0, key = first; i < count; ++i, key += kKeyTile) {
      load_keys(tiles_[i] = {key, std::min(kKeyTile, end - key), key - first});
    }
    for (int64_t query = 0; query < s_.queries; query += kQueryTile) {
      add_queries(head, rule, count, query, std::min(kQueryTile, s_.queries - query));
    }
    for (int64_t i = 0; i < count; ++i) {
      begin(tiles_[i], tiles_[i].cols);
      add_columns(scratch_.dk_run, tiles_[i], dk_, t_.dk);
      add_columns(scratch_.dv_run, tiles_[i], dv_, t_.dv);
    }
  }

  void load_keys(const KeyTile& tile) {
    const int64_t D = sizes_.head_dim, depth = sizes_.depth<C>();
    const HeadRows<T> k = head_rows<T>(a_.k, s_.batch, head_, s_.key + tile.key);
    const HeadRows<T> v = head_rows<T>(a_.v, s_.batch, head_, s_.key + tile.key);
    right_rows(k.data, k.stride, tile.keys, D, scratch_.k + tile.at * D, tile.cols);
    right_columns(k.data, k.stride, tile.keys, D, scratch_.k_t + tile.at * depth, depth, tile.cols);
    right_columns(v.data, v.stride, tile.keys, D, scratch_.v_t + tile.at * depth, depth, tile.cols);
  }

  // Zeros for those of a tile's first n columns that nothing was written to so far.
  void begin(KeyTile& tile, int64_t n) {
    const int64_t D = sizes_.head_dim, begun = tile.begun;
    for (int64_t d = 0; begun < n && d < D; ++d) {
      const int64_t place = tile.at * D + d * tile.cols + begun;
      std::fill_n(scratch_.dk_run + place, n - begun, A(0));
      std::fill_n(scratch_.dv_run + place, n - begun, A(0));
    }
    tile.begun = std::max(begun, n);
  }

  // The gradients of a tile of keys go to their sums or, where nothing else adds to them, out.
  void add_columns(const A* run, const KeyTile& tile, const HeadRows<A>& sums,
                   const at::Tensor& out) {
    const int64_t D = sizes_.head_dim;
    const A* columns = run + tile.at * D;
    if (sums.data != nullptr) {
      return add_transposed(columns, tile.cols, tile.keys, D, sums.row(tile.key), sums.stride);
    }
    // What a thread's tiles of scores lie in is free between runs.
    A* rows = scratch_.probs;
    const int64_t step = std::max<int64_t>(1, sizes_.rows * sizes_.cols / D);
    for (int64_t first = 0; first < tile.keys; first += step) {
      const int64_t n = std::min(step, tile.keys - first);
      std::fill_n(rows, n * D, A(0));
      add_transposed(columns + first, tile.cols, n, D, rows, D);
      store({rows, D}, n, out, head_, s_.key + tile.key + first);
    }
  }

  void add_queries(int64_t head, const AttentionRule& rule, int64_t count, int64_t query,
                   int64_t rows) {
    const int64_t depth = sizes_.depth<C>(), all = filled_rows(rows);
    bool loaded = false;
    for (int64_t i = 0; i < count; ++i) {
      KeyTile& keys = tiles_[i];
      const ScoreTile tile = score_tile(rule, s_.first + query, rows, keys.key, sizes_.cols);
      if (tile.cols == 0) continue;
      if (!loaded) load_queries(head, query, rows, all);
      loaded = true;
      const int64_t multiplied = multiplied_cols(keys.keys, tile.cols);
      multiply(all, multiplied, depth, scratch_.q, depth, scratch_.k_t + keys.at * depth, keys.cols,
               scratch_.probs, tile.stride, /*add=*/false);
      multiply(all, multiplied, depth, scratch_.dout, depth, scratch_.v_t + keys.at * depth,
               keys.cols, scratch_.dprobs, tile.stride, /*add=*/false);
      const A* lse = static_cast<const A*>(t_.lse.const_data_ptr()) + s_.batch * t_.lse.stride(0) +
                     head * t_.lse.stride(1) + s_.query + query;
      attention_bwd_tile(rule, tile, scratch_.probs, scratch_.dprobs, lse, scratch_.delta + query,
                         scratch_.operands);
      add_tile(tile, all, keys, dq_.row(query));
    }
  }

  // A tile of queries as operands.
  void load_queries(int64_t head, int64_t query, int64_t rows, int64_t all) {
    const int64_t D = sizes_.head_dim, depth = sizes_.depth<C>(), row = s_.query + query;
    const HeadRows<T> q = head_rows<T>(a_.q, s_.batch, head, row);
    const HeadRows<T> dout = head_rows<T>(t_.dout, s_.batch, head, row);
    left_rows(q.data, q.stride, rows, D, scratch_.q, all, depth);
    left_rows(dout.data, dout.stride, rows, D, scratch_.dout, all, depth);
    left_columns(q.data, q.stride, rows, D, scratch_.q_t, all);
    left_columns(dout.data, dout.stride, rows, D, scratch_.dout_t, all);
  }

  // What one tile adds to the gradients. Rows beyond the queries' are zeros.
  void add_tile(const ScoreTile& tile, int64_t all, KeyTile& keys, A* dq) {
    const int64_t D = sizes_.head_dim, rows = tile.rows;
    const int64_t cols = multiplied_cols(keys.keys, tile.cols);
    constexpr bool kRounded = Scratch<T, C>::kRounded;
    const int64_t stride = kRounded ? tile.cols : tile.stride;
    const BackwardOperands<C>& p = scratch_.operands;
    // Rows abreast were filled up with a row of zeros.
    for (int64_t r = kRounded ? rows + rows % 2 : rows; r < all; ++r) {
      std::fill_n(p.right_probs + r * stride, tile.cols, C{});
      std::fill_n(p.right_dprobs + r * stride, tile.cols, C{});
    }
    // A tile's first products are written, not added.
    const bool add = keys.begun > 0;
    add ? begin(keys, cols) : void(keys.begun = cols);
    multiply(D, cols, all, scratch_.dout_t, all, p.right_probs, stride,
             scratch_.dv_run + keys.at * D, keys.cols, add);
    multiply(D, cols, all, scratch_.q_t, all, p.right_dprobs, stride, scratch_.dk_run + keys.at * D,
             keys.cols, add);
    // Of an output no more rows than it has.
    multiply(kConverted<T> ? all : rows, D, cols, p.left_dprobs, stride, scratch_.k + keys.at * D,
             D, dq, dq_.stride, /*add=*/true);
  }

  const AttentionProblem& a_;
  const TileSizes& sizes_;
  const Tensors& t_;
  const AttentionSequence& s_;
  int64_t sequence_, head_;
  Pieces pieces_;
  Scratch<T, C> scratch_;
  KeyTile tiles_[kKeyRun / kKeyTile];  // of the run at hand
  HeadRows<A> dq_{}, dk_{}, dv_{};     // without data: what is added there is all
};

void run(const AttentionProblem& a, const Tensors& t) {
  if (a.head_dim() == 0) return;
  const TileSizes sizes = tile_sizes(a);
  const int64_t heads = a.kv_heads();
  for_tile_types(a.q.scalar_type(), [&](auto type, auto multiplied) {
    using T = decltype(type);
    using C = decltype(multiplied);
    Pieces pieces(nullptr);
    Scratch<T, C>(pieces, sizes, t.onto);
    run_tasks(int64_t(a.sequences.size()) * heads, pieces.bytes(), [&](int64_t task, char* memory) {
      KeyValueHead<T, C>(a, sizes, t, task / heads, task % heads, memory).run();
    });
  });
}

// Zeros where the output is its own sum.
at::Tensor gradient_buffer(const at::Tensor& x, bool summed) {
  const bool own = x.scalar_type() == acc_dtype(x.scalar_type());
  return attention_buffer(x, x.size(1), x.size(2), summed && own);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_tiled_bwd(const AttentionProblem& a,
                                                                   const at::Tensor& dout,
                                                                   const at::Tensor& o,
                                                                   const at::Tensor& lse) {
  const Tensors t{dout,
                  o,
                  lse,
                  gradient_buffer(a.q, true),
                  gradient_buffer(a.k, a.group() > 1),
                  gradient_buffer(a.v, a.group() > 1)};
  run(a, t);
  return {t.dq, t.dk, t.dv};
}

at::Tensor attention_tiled_bwd_onto(const AttentionProblem& a, const at::Tensor& dout,
                                    const at::Tensor& o, const at::Tensor& lse,
                                    const at::Tensor& dk, const at::Tensor& dv) {
  const at::Tensor dq = gradient_buffer(a.q, true);
  run(a, {dout, o, lse, dq, dk, dv, /*onto=*/true});
  return dq;
}

}  // namespace ckptfused
