#include "ops/torch.h"

#include <cmath>

#include "ops/attention_tiles_cpu.h"

namespace ckptfused {
namespace {

using namespace tiles;

template <typename T>
struct Scratch {
  using A = acc_t<T>;
  A *scores, *max, *sum, *out;
  A *q = nullptr, *kv = nullptr;  // converted tiles

  Scratch(Pieces& pieces, int64_t queries, int64_t keys, int64_t head_dim) {
    const int64_t rows = std::min(kQueryTile, queries), cols = std::min(kKeyTile, keys);
    scores = pieces.take<A>(rows * cols);
    max = pieces.take<A>(rows);
    sum = pieces.take<A>(rows);
    out = pieces.take<A>(rows * head_dim);
    if (!kConverted<T>) return;
    q = pieces.take<A>(rows * head_dim);
    kv = pieces.take<A>(cols * head_dim);
  }
};

// Queries [query, query + kQueryTile) of one head of one sequence.
struct Task {
  int64_t sequence, head, query;
};

std::vector<Task> tasks_of(const AttentionProblem& a) {
  std::vector<Task> tasks;
  for (int64_t s = 0; s < int64_t(a.sequences.size()); ++s) {
    for (int64_t head = 0; head < a.heads(); ++head) {
      for (int64_t query = 0; query < a.sequences[s].queries; query += kQueryTile) {
        tasks.push_back({s, head, query});
      }
    }
  }
  return tasks;
}

template <typename T>
void run_task(const AttentionProblem& a, const Task& task, const at::Tensor& o,
              const at::Tensor& lse, char* memory) {
  using A = acc_t<T>;
  const int64_t D = a.head_dim(), kv_head = task.head / a.group();
  const AttentionSequence& s = a.sequences[task.sequence];
  const AttentionRule rule = attention_rule(a, task.sequence, task.head);
  const int64_t rows = std::min(kQueryTile, s.queries - task.query);
  const int64_t first = s.query + task.query;
  Pieces pieces(memory);
  const Scratch<T> scratch(pieces, a.max_queries, a.max_keys, D);

  const Matrix<A> q = widen(head_rows<T>(a.q, s.batch, task.head, first, rows), scratch.q);
  const SoftmaxRows<A> state{scratch.max, scratch.sum, scratch.out, D};
  std::fill_n(state.max, rows, A(-INFINITY));
  std::fill_n(state.sum, rows, A(0));
  std::fill_n(state.out, rows * D, A(0));
  for_key_tiles(rule, s.first + task.query, rows, [&](const ScoreTile& tile) {
    const auto widened = [&](const at::Tensor& t) {
      return widen(head_rows<T>(t, s.batch, kv_head, s.key + tile.key, tile.cols), scratch.kv);
    };
    const Matrix<A> scores{scratch.scores, rows, tile.cols, tile.stride};
    tile_product(scores, q, widened(a.k).t(), a.scale, false);
    attention_fwd_tile(rule, tile, scores.data, state);
    tile_product({state.out, rows, D, D}, scores, widened(a.v), 1.0, true);
  });

  const Matrix<T> o_rows = head_rows<T>(o, s.batch, task.head, first, rows);
  A* lse_rows = static_cast<A*>(lse.mutable_data_ptr()) + s.batch * lse.stride(0) +
                task.head * lse.stride(1) + first;
  attention_finish_rows(state, rule.dropout, rows, o_rows.data, o_rows.stride, lse_rows);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> attention_tiled_fwd(const AttentionProblem& a) {
  const at::ScalarType dtype = a.q.scalar_type();
  const int64_t tokens = a.q.size(2);
  const at::Tensor o = attention_buffer(a.q, a.heads(), tokens, false);
  const auto options = a.q.options().dtype(acc_dtype(dtype));
  const at::Tensor lse = at::empty({a.batch(), a.heads(), tokens}, options);

  const std::vector<Task> tasks = tasks_of(a);
  const int64_t bytes = attention_fwd_scratch_bytes(dtype, a.max_queries, a.max_keys, a.head_dim());
  for_dtype(dtype, [&](auto type) {
    run_tasks(int64_t(tasks.size()), bytes, [&](int64_t task, char* memory) {
      run_task<decltype(type)>(a, tasks[task], o, lse, memory);
    });
  });
  return {o, lse};
}

int64_t attention_fwd_scratch_bytes(at::ScalarType dtype, int64_t queries, int64_t keys,
                                    int64_t head_dim) {
  return for_dtype(dtype, [&](auto type) {
    Pieces pieces(nullptr);
    Scratch<decltype(type)>(pieces, queries, keys, head_dim);
    return pieces.bytes();
  });
}

}  // namespace ckptfused
