#include "ops/torch.h"

#include <cmath>

#include "ops/attention_tiles_cpu.h"

namespace ckptfused {
namespace {

using namespace tiles;

// Queries of each head of the group that a task takes.
int64_t run_of(const TileSizes& s) {
  const int64_t run = std::max(kQueryTile, kQueryRun / s.group / kQueryTile * kQueryTile);
  return std::min(run, filled_rows(s.queries));
}

// Scratch of one thread. C: the type that is multiplied.
template <typename T, typename C>
struct Scratch {
  using A = acc_t<T>;
  static constexpr bool kRounded = !std::is_same_v<A, C>;
  A *scores, *max, *sum, *out;
  C *probs, *q, *k, *v;

  Scratch(Pieces& pieces, const TileSizes& s) {
    const int64_t run = s.group * run_of(s);
    scores = pieces.take<A>(s.rows * s.cols);
    max = pieces.take<A>(run);
    sum = pieces.take<A>(run);
    out = pieces.take<A>(run * s.head_dim);
    if constexpr (kRounded) {
      probs = pieces.take<C>(s.rows * s.cols);
    } else {
      probs = scores;
    }
    q = pieces.take<C>(run * s.depth<C>());
    k = pieces.take<C>(s.depth<C>() * s.cols);
    v = pieces.take<C>(s.cols * s.head_dim);
  }
};

// A run of queries of the heads that read one key/value head of one sequence.
struct Task {
  int64_t sequence, kv_head, query, queries;
};

std::vector<Task> tasks_of(const AttentionProblem& a, int64_t run) {
  std::vector<Task> tasks;
  for (int64_t s = 0; s < int64_t(a.sequences.size()); ++s) {
    const int64_t queries = a.sequences[s].queries;
    for (int64_t kv_head = 0; kv_head < a.kv_heads(); ++kv_head) {
      for (int64_t query = 0; query < queries; query += run) {
        tasks.push_back({s, kv_head, query, std::min(run, queries - query)});
      }
    }
  }
  return tasks;
}

template <typename T, typename C>
class QueryRun {
 public:
  using A = acc_t<T>;

  QueryRun(const AttentionProblem& a, const TileSizes& sizes, const Task& task, char* memory)
      : a_(a),
        sizes_(sizes),
        task_(task),
        s_(a.sequences[task.sequence]),
        pieces_(memory),
        scratch_(pieces_, sizes) {}

  void run(const at::Tensor& o, const at::Tensor& lse) {
    for_tiles([&](int64_t head, int64_t query, int64_t rows) { begin(head, query, rows); });
    // Every head of the group sees the same keys by position.
    const AttentionRule rule = attention_rule(a_, task_.sequence, task_.kv_head * a_.group());
    const int64_t first = s_.first + task_.query, last = first + task_.queries - 1;
    const int64_t begin = visible_keys(first, rule.keys, rule.causal, rule.window).begin;
    const int64_t end = visible_keys(last, rule.keys, rule.causal, rule.window).end;
    for (int64_t key = begin / kKeyTile * kKeyTile; key < end; key += kKeyTile) add_keys(key);
    for_tiles([&](int64_t head, int64_t query, int64_t rows) {
      const int64_t row = s_.query + task_.query + query;
      const HeadRows<T> o_rows = head_rows<T>(o, s_.batch, head, row);
      A* lse_rows = static_cast<A*>(lse.mutable_data_ptr()) + s_.batch * lse.stride(0) +
                    head * lse.stride(1) + row;
      attention_finish_rows(state(head, query), attention_rule(a_, task_.sequence, head), rows,
                            o_rows.data, o_rows.stride, lse_rows);
    });
    end_products<C>();
  }

 private:
  // Calls f(head, query, rows) for each tile of the run's queries, query counted from its first.
  template <typename F>
  void for_tiles(F f) {
    for (int64_t head = task_.kv_head * a_.group(); head < (task_.kv_head + 1) * a_.group();
         ++head) {
      for (int64_t query = 0; query < task_.queries; query += kQueryTile) {
        f(head, query, std::min(kQueryTile, task_.queries - query));
      }
    }
  }

  // Where a tile's rows begin among those of the run.
  int64_t row_of(int64_t head, int64_t query) const {
    return (head - task_.kv_head * a_.group()) * run_of(sizes_) + query;
  }
  SoftmaxRows<A> state(int64_t head, int64_t query) const {
    const int64_t row = row_of(head, query);
    return {scratch_.max + row, scratch_.sum + row, scratch_.out + row * sizes_.head_dim,
            sizes_.head_dim};
  }

  void begin(int64_t head, int64_t query, int64_t rows) {
    const SoftmaxRows<A> rows_state = state(head, query);
    std::fill_n(rows_state.max, rows, A(-INFINITY));
    std::fill_n(rows_state.sum, rows, A(0));
    std::fill_n(rows_state.out, filled_rows(rows) * sizes_.head_dim, A(0));
    const HeadRows<T> q = head_rows<T>(a_.q, s_.batch, head, s_.query + task_.query + query);
    const int64_t depth = sizes_.depth<C>();
    left_rows(q.data, q.stride, rows, sizes_.head_dim, scratch_.q + row_of(head, query) * depth,
              filled_rows(rows), depth);
  }

  void add_keys(int64_t key) {
    const int64_t D = sizes_.head_dim, depth = sizes_.depth<C>();
    const int64_t keys = std::min(kKeyTile, s_.keys - key), cols = filled_cols(keys);
    const HeadRows<T> k = head_rows<T>(a_.k, s_.batch, task_.kv_head, s_.key + key);
    const HeadRows<T> v = head_rows<T>(a_.v, s_.batch, task_.kv_head, s_.key + key);
    right_columns(k.data, k.stride, keys, D, scratch_.k, depth, cols);
    right_rows(v.data, v.stride, keys, D, scratch_.v, cols);
    for_tiles([&](int64_t head, int64_t query, int64_t rows) {
      const AttentionRule rule = attention_rule(a_, task_.sequence, head);
      const ScoreTile tile =
          score_tile(rule, s_.first + task_.query + query, rows, key, sizes_.cols);
      if (tile.cols == 0) return;
      const SoftmaxRows<A> rows_state = state(head, query);
      const int64_t all = filled_rows(rows), multiplied = multiplied_cols(keys, tile.cols);
      // Probabilities in place have the scores' rows.
      const int64_t stride = Scratch<T, C>::kRounded ? tile.cols : tile.stride;
      multiply(all, multiplied, depth, scratch_.q + row_of(head, query) * depth, depth, scratch_.k,
               cols, scratch_.scores, tile.stride, /*add=*/false);
      attention_fwd_tile(rule, tile, scratch_.scores, rows_state, scratch_.probs, stride);
      multiply(all, D, multiplied, scratch_.probs, stride, scratch_.v, D, rows_state.out, D,
               /*add=*/true);
    });
  }

  const AttentionProblem& a_;
  const TileSizes& sizes_;
  const Task& task_;
  const AttentionSequence& s_;
  Pieces pieces_;
  Scratch<T, C> scratch_;
};

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_tiled_fwd(const AttentionProblem& a) {
  const at::ScalarType dtype = a.q.scalar_type();
  const int64_t tokens = a.q.size(2);
  const at::Tensor o = attention_buffer(a.q, a.heads(), tokens, false);
  const auto options = a.q.options().dtype(acc_dtype(dtype));
  const at::Tensor lse = at::empty({a.batch(), a.heads(), tokens}, options);

  const TileSizes sizes = tile_sizes(a);
  const std::vector<Task> tasks = tasks_of(a, run_of(sizes));
  for_tile_types(dtype, [&](auto type, auto multiplied) {
    using T = decltype(type);
    using C = decltype(multiplied);
    Pieces pieces(nullptr);
    Scratch<T, C>(pieces, sizes);
    run_tasks(int64_t(tasks.size()), pieces.bytes(), [&](int64_t task, char* memory) {
      QueryRun<T, C>(a, sizes, tasks[task], memory).run(o, lse);
    });
  });
  return {o, lse};
}

}  // namespace ckptfused
