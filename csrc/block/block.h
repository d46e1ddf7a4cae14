#pragma once

#include "ops/torch.h"

#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "block/ops.h"
#include "block/spec.h"
#include "block/tiles.h"
#include "block/values.h"
#include "ops/adapters.h"

namespace ckptfused {

// Whether one kernel may make the hidden value's products and activation, on a device that has one.
bool may_fuse_up(const FFNSpec& f, int64_t rows);
// Whether the kernel that closes the attention half makes the FFN's first norm, too.
bool residual_makes_next_norm(const BlockSpec& spec);

// A block call: what it is given, its intermediates, and one idempotent producer per intermediate.
// Forward calls the producers and drops what is not kept; backward calls them again for what is
// missing. That is why gradients do not depend on what was kept: there is no second way to make a
// value.
class Block {
 public:
  Block(const BlockSpec& spec, const at::Tensor& x, const OptTensorList& params,
        const OptTensorList& aux, const std::optional<at::Tensor>& rng_state);

  // Returns y followed, when save is set, by the kept values in the order of KeepSpec.
  std::vector<at::Tensor> forward(bool save);

  // Gradients of those of (x, params...) that needs asks for, in order.
  std::vector<at::Tensor> backward(const at::Tensor& dy, at::TensorList kept,
                                   const std::vector<bool>& needs);

 private:
  // block.cpp: the residual stream
  at::Tensor forward_rows();                       // y
  at::Tensor backward_rows(const at::Tensor& dy);  // d x, undefined if nobody needs it
  void ensure_mid();
  void release_o();
  void ensure_ffn_in();
  void ensure_n2();
  void ensure_out();

  // kept.cpp
  std::vector<at::Tensor> kept_values() const;
  std::vector<at::Tensor> with_kept(const at::Tensor& y) const;
  void restore(at::TensorList kept);

  // attention.cpp
  void ensure_n1();
  void ensure_qkv();
  void ensure_qk();
  bool make_qk();
  void scale_by_position(at::Tensor& q, bool own) const;
  void norm_v();
  at::Tensor v_backward(const at::Tensor& dv, const at::Tensor& raw);
  void make_qk_in_steps();
  void qk_backward_in_steps(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                            const at::Tensor& raw, const at::Tensor& dqkv);
  struct Side {
    HeadColumns columns;  // of q or k among those of the raw product
    int slot;             // of their norm's weight
    at::Tensor* made;
    const char *name, *gradient, *gradient_rows;
  };
  std::vector<Side> sides();
  at::Tensor turned_heads(const at::Tensor& raw);
  void ensure_attn();
  void ensure_proj();
  void release_n1();
  void release_heads();
  void release_qkv();
  bool makes_qkv_again() const;
  at::Tensor o_rows() const;
  at::Tensor heads_view(const at::Tensor& buffer, const HeadColumns& columns) const;
  HeadColumns o_columns() const { return {spec_.attn.heads, 0, spec_.attn.head_dim}; }
  call::AttentionArgs attention_args() const;
  call::QkArgs qk_args() const;
  std::vector<Part> qkv_parts() const;
  // ds: gradient of the half's sum. Returns the gradient of n1 (undefined where not needed).
  at::Tensor attention_backward(const at::Tensor& ds);
  // raw: the product, where its norm's backward reads it. Undefined gradients are not there.
  at::Tensor qkv_backward(at::Tensor dq, at::Tensor dk, at::Tensor dv, at::Tensor raw,
                          const at::Tensor& d_gate = {});
  bool makes_q() const { return projected_ != Projected::k_and_v; }
  bool makes_keys() const { return projected_ != Projected::q; }

  // output_gate.cpp
  at::Tensor gate_view(const at::Tensor& buffer) const;
  at::Tensor gate_rows() const;
  at::Tensor gated_rows();
  at::Tensor gate_backward(const at::Tensor& d_o, const at::Tensor& memory) const;
  void gate_grad_out(const at::Tensor& dqkv, const at::Tensor& d_gate) const;

  // rows.cpp: the block by tiles of queries
  struct KeyValues {
    at::Tensor k, v, dk, dv;  // [B, G, T, D]; sums in the accumulation type
  };
  bool by_tiles() const { return tile_rows_ < (spec_.seq_first ? N_ : T_); }
  Block of_rows(int64_t row0, int64_t rows) const;
  void take_back(Block&& part);
  template <typename F>
  void for_runs(F f);
  template <typename F>
  void for_tiles(F f);
  at::Tensor key_heads(at::ScalarType type, const char* name) const;
  at::Tensor token_rows(const at::Tensor& heads, int64_t row0) const;
  void copy_qkv(const at::Tensor& kept) const;
  void copy_kept(const Values& kept) const;
  void make_keys();
  at::Tensor forward_in_tiles();
  at::Tensor backward_in_tiles(const at::Tensor& dy);
  void keys_backward(const at::Tensor& dk, const at::Tensor& dv, const at::Tensor& dx);

  // ffn.cpp
  struct Tile {
    int64_t row0, rows, col0, cols;
  };
  std::vector<Tile> tiles() const;
  void set_ffn_tiles();
  bool may_go_by_queries() const;
  void set_query_tiles();
  bool tiled() const { return tiles_.rows < N_ || tiles_.cols < spec_.ffn.hidden; }
  // Gate and up pre-activations of a tile, as columns of one buffer. Non-gated: up alone.
  struct GateUp {
    at::Tensor buffer;  // [rows, 2*cols] or [rows, cols], undefined for views of the kept gu
    at::Tensor gate, up;
  };
  GateUp replayed_gu_;  // made on the way to the down product, and still whole
  GateUp gate_up(const at::Tensor& buffer, const Tile& tile) const;
  std::vector<Part> gu_parts(const Tile& tile) const;
  // Of the tile at hand, whose gate and up weights lie apart where it is not the whole width.
  Joined joined_;
  void begin(const Tile& t) {
    joined_ = {at::Tensor(), at::Tensor(), spec_.ffn.gated() && t.cols < spec_.ffn.hidden};
  }
  const Joined& join(const Tile& tile);  // with its weights, for a product
  GateUp make_gu(const Tile& tile);
  void activate(const GateUp& gu, const Tile& tile, const at::Tensor& h) const;
  void activation_backward(const GateUp& gu, const Tile& tile, const at::Tensor& h, bool need_h,
                           const GateUp& dgu);
  at::Tensor coefficients() const;
  // One kernel for the products and the activation, where there is one that was measured faster.
  // The same in forward and backward, whatever is kept: it decides the bits of g and u.
  std::string up_kernel_ = "cublas";
  bool one_kernel() const { return up_kernel_ != "cublas"; }
  void choose_up_kernel();
  at::Tensor kept_gu(const Tile& tile) const;
  call::UpWeights up_weights(const Tile& tile);
  at::Tensor down_weight(const Tile& tile);
  call::HiddenMask hidden_mask(const Tile& tile) const;
  // onto: a sum that the product adds to in place of making a value.
  void ensure_down(const at::Tensor& onto = {});
  bool down_adds() const;
  // ds: gradient of the half's sum. Returns the gradient of n2 (undefined where not needed).
  at::Tensor ffn_backward(const at::Tensor& ds, bool need_n2);

  // Parameters and gradients. Slots are global: those of the FFN half follow the attention's.
  int attn_slot(int slot) const { return slot; }
  int ffn_slot(int slot) const { return (spec_.has_attn ? int(kAttentionParams) : 0) + slot; }
  const at::Tensor& param(int slot) const { return params_[slot]; }
  at::Tensor weight(int slot);  // in the compute type
  bool need(int slot) const { return backward_ && needs_[1 + slot]; }
  // Also whether an adapter of a weight among them is trained.
  bool need_any(int begin, int end) const;
  void narrow_vectors();
  at::Tensor grad_vector(int slot);  // where a sum over rows writes; may be undefined
  at::Tensor weight_grad(int slot, at::ScalarType type);
  bool add_weight_grads(const std::vector<Part>& parts, bool transposed, const at::Tensor& dout,
                        const at::Tensor& in);
  void add_weight_grad(int slot, bool transposed, int64_t row0, int64_t rows, int64_t col0,
                       int64_t cols, const at::Tensor& dout, const at::Tensor& in, bool add);
  void add_bias_grad(int slot, int64_t row0, const at::Tensor& dout, bool add);
  at::Tensor part_weight(const Part& part, bool transposed);
  std::optional<at::Tensor> part_bias(const Part& part);
  // Products and adapters; row0: the first of the rows of in among those of the block. joined: one
  // product in place of one for each part.
  void project(const char* name, const at::Tensor& out, const at::Tensor& in,
               const std::vector<Part>& parts, bool transposed, int64_t row0 = 0,
               const Joined& joined = {});
  // Gradients of a projection's weights, biases and adapters, and of its input into din if defined.
  void project_backward(const at::Tensor& dout, const at::Tensor& in,
                        const std::vector<Part>& parts, bool transposed, const at::Tensor& din,
                        bool add_params, bool add_din, int64_t row0 = 0, const Joined& joined = {});

  // adapters.cpp
  struct AdapterSlots {
    const AdapterSpec* spec;
    int weight;  // slot of the weight of the product that the adapter adds to
    int first;   // slot of a; b and the bias follow
    int64_t site;
  };
  enum class AdapterUse { forward, input_grad, all_grads };
  std::vector<AdapterSlots> adapters_;
  void find_adapters();
  void check_adapters() const;
  size_t adapter_params() const;
  bool adapter_trained(const AdapterSlots& s) const {
    return need(s.first) || need(s.first + 1) || need(s.first + 2);
  }
  at::Tensor adapter_param(int slot);
  bool adapters_in_halves(const at::Tensor& like, const Part& part);
  void split_adapters();
  at::Tensor adapter_grad(int slot);
  Adapters adapters_of(const Part& part, int64_t col0, int64_t width, AdapterUse use,
                       const at::Tensor& like);
  void add_adapters(const at::Tensor& out, const at::Tensor& in, const Part& part, int64_t row0);
  void adapters_backward(const at::Tensor& dout, const at::Tensor& in, const Part& part,
                         const at::Tensor& din, int64_t row0, int64_t col0, int64_t cols);

  // quantized.cpp: weights that are stored in few bits
  struct QuantizedSlots {
    const QuantizedSpec* spec;
    int weight;  // slot of the codes
    int first;   // slot of scale; the others follow
  };
  std::vector<QuantizedSlots> quantized_;
  void find_quantized();
  size_t quantized_params() const;
  const QuantizedSlots* quantized(int slot) const;
  std::vector<int64_t> weight_sizes(int slot) const;  // whatever it is stored as
  at::Tensor dequantized(const QuantizedSlots& stored);
  bool numbers_fit(int first) const;  // those of slots from there on, in scratch
  class HeldWeights;
  int held_from_ = std::numeric_limits<int>::max();  // the first slot whose numbers stay

  // frame.cpp
  struct Rows {
    int64_t first, count, sample;  // of which batch element, -1: of all
    at::Tensor of(const at::Tensor& t) const;
  };
  std::vector<Rows> rows_by_vector(std::initializer_list<int> slots) const;
  at::Tensor vector(int slot, const Rows& rows) const;
  std::vector<int64_t> row_map_of(const Rows& rows) const;
  at::Tensor pre_norm(const at::Tensor& x, const NormSpec& norm, int weight, int bias,
                      at::ScalarType type, const char* name);
  void close(const at::Tensor& x, const at::Tensor& f, const HalfSpec& half, int post_weight,
             int site, const NormSpec& next, int next_weight, const at::Tensor& sum,
             const at::Tensor& normed);
  at::Tensor residual_backward(const at::Tensor& ds, const at::Tensor& f, const HalfSpec& half,
                               int post_weight, int site);
  // dres + d(norm)/dx(dn), with the norm's weight gradients; undefined if the input needs none.
  at::Tensor norm_backward(const at::Tensor& dn, const at::Tensor& x, const NormSpec& norm,
                           int weight, const at::Tensor& dres, bool dres_owned, bool need_dx,
                           const char* name);
  // Where a kernel leaves the sums of a norm's gradient over chunks of those rows, columns and
  // heads of a row (0: no heads), which sum_partials adds up; may be undefined.
  at::Tensor grad_partials(int slot, const int64_t (&rows)[3], int64_t sample = -1);
  at::Tensor grad_partials(int slot, const Rows& rows);
  void sum_partials();
  struct Partial {
    int slot;
    int64_t sample;
    at::Tensor sums;
  };

  // name: in a ledger.
  at::Tensor empty(at::IntArrayRef size, at::ScalarType type, const char* name,
                   int64_t slot = -1) const;
  at::Tensor like_x(at::ScalarType type, const char* name) const {
    return empty({N_, C_}, type, name);
  }
  at::Tensor rows_view(const at::Tensor& t) const { return t.view({N_, t.size(-1)}); }
  at::IntArrayRef row_map() const { return row_map_; }

  const BlockSpec& spec_;
  at::Tensor x_;                    // [N, C]
  std::vector<int64_t> x_sizes_;    // as given
  std::vector<at::Tensor> params_;  // undefined where absent
  std::vector<at::Tensor> cast_;    // parameters in the compute type, made on first use
  at::Tensor cos_, sin_;            // [B or 1, T, rotary_dim / 2], accumulation type
  at::Tensor q_scale_;              // [B or 1, T], compute type
  at::Tensor mask_, padding_, cu_seqlens_, rng_;
  at::ScalarType R_, P_, A_;  // residual stream, compute, accumulation
  int64_t B_, T_, N_, C_;
  std::vector<int64_t> row_map_;
  int64_t tile_rows_ = 0;  // of a block by tiles of queries their rows, else all that share keys
  std::vector<int64_t> query_tile_;  // where a tile lies, as attention's ops are told
  Projected projected_ = Projected::all;
  KeyValues keys_;     // of all keys that a tile of queries attends to
  bool sums_ = false;  // gradients are sums over tiles, held wide
  FFNTiles tiles_{0, 0};
  Values value_;
  bool save_ = false, backward_ = false;
  bool qk_in_place_ = false;  // qkv no longer holds the raw product
  std::vector<bool> needs_;
  std::vector<at::Tensor> grads_;
  std::vector<Partial> partials_;  // of the gradients of slots
  at::Tensor adapter_halves_;  // [2, numbers] of all of them that are wider: rounded, and the rest
  std::vector<int64_t> adapter_places_;  // of slots among the numbers, from the first adapter's; -1
};

}  // namespace ckptfused
