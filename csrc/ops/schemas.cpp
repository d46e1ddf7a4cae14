#include "ops/torch.h"

// Every schema of the extension. Kernels register per dispatch key in their own files; fake
// kernels and FLOP formulas are in ckptfused/ops/fake.py.

namespace {

// The arguments that all three block families share.
#define CKPT_BLOCK_ARGS "Tensor?[] params, Tensor?[] aux"

void define_block(torch::Library& m, const std::string& stem) {
  const std::vector<at::Tag> pure = {at::Tag::pt2_compliant_tag};
  const auto def = [&](const std::string& schema) { m.def(schema.c_str(), pure); };
  def(stem + "(Tensor x, " CKPT_BLOCK_ARGS ", str spec, Generator? generator=None) -> Tensor");
  def(stem + "_fwd(Tensor x, " CKPT_BLOCK_ARGS
             ", Tensor? rng_state, str spec, bool save) -> Tensor[]");
  def(stem + "_bwd(Tensor dy, Tensor x, " CKPT_BLOCK_ARGS
             ", Tensor[] kept, Tensor? rng_state, str spec, bool[] needs) -> Tensor[]");
}

}  // namespace

TORCH_LIBRARY(ckptfused, m) {
  // Blocks: opaque and pure.
  define_block(m, "block");
  define_block(m, "attention_block");
  define_block(m, "ffn_block");

  // A loss head: x, the head's weight and bias, its adapters (a, b, bias of each), to the loss. fwd
  // returns each token's loss, its log-sum-exp, its largest logit's class, and, where they are
  // kept, the gradients that `needs` asks for: of x, weight, bias and the adapters' tensors, for a
  // loss that is the sum over tokens. bwd makes them for any dloss.
#define CKPT_LOSS_ARGS                                     \
  "Tensor x, Tensor weight, Tensor? bias, Tensor target, " \
  "Tensor? class_weight, Tensor?[] adapters"
  const std::vector<at::Tag> pure = {at::Tag::pt2_compliant_tag};
  m.def("linear_cross_entropy(" CKPT_LOSS_ARGS
        ", str spec, Generator? generator=None) -> (Tensor loss, Tensor token_loss, Tensor lse, "
        "Tensor predicted)",
        pure);
  m.def("linear_cross_entropy_fwd(" CKPT_LOSS_ARGS
        ", Tensor? rng_state, str spec, bool[] needs) -> Tensor[]",
        pure);
  m.def("linear_cross_entropy_bwd(Tensor dloss, " CKPT_LOSS_ARGS
        ", Tensor lse, Tensor[] kept, Tensor? rng_state, str spec, bool[] needs) -> Tensor[]",
        pure);

  // The experts of a mixture: y[n] = the sum over j of weights[n, j] * expert[ids[n, j]](x[n]), of
  // x [N, C], ids and weights [N, k] and stacks of weights, one matrix an expert; stored: what is
  // beside those in few bits, as dequantize's state, of up and then of down.
#define CKPT_EXPERTS_ARGS                                                           \
  "Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, " \
  "Tensor? down_bias, Tensor?[] adapters, Tensor?[] stored, Tensor? rng_state, str spec"
  m.def("experts(" CKPT_EXPERTS_ARGS ") -> Tensor", pure);
  m.def("experts_fwd(" CKPT_EXPERTS_ARGS ") -> Tensor", pure);
  m.def("experts_bwd(Tensor dy, " CKPT_EXPERTS_ARGS ", bool[] needs) -> Tensor[]", pure);

  // Random numbers. The call_id keeps common-subexpression elimination from merging two draws.
  m.def("rng_state(Tensor like, int call_id, *, Generator? generator=None) -> Tensor",
        {at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag});
  m.def("dropout_mask(int[] shape, float p, Tensor rng_state, int site) -> Tensor",
        {at::Tag::pt2_compliant_tag});

  // A weight that is stored in few bits, of these sizes; state: scale, offset, nested_scale and
  // table; form: how, as ckptfused/spec/quantized.py says it. first: of a stack's entries, the
  // first one wanted.
  m.def(
      "dequantize(Tensor codes, Tensor?[] state, str form, int[] sizes, ScalarType dtype, "
      "int first=0) -> Tensor",
      {at::Tag::pt2_compliant_tag});

  // Tensors over the memory of others, each copied when it is first written, and what makes them so
  // for as long as it lives; afterwards each has memory of its own.
  m.def("copy_on_write(Tensor[] tensors) -> (Tensor[], Tensor)", {at::Tag::pt2_compliant_tag});

  // A norm over the last dimension by itself, and the gradients asked for of x, weight and bias.
  m.def("norm(Tensor x, Tensor? weight, Tensor? bias, str kind, float eps) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "norm_grads(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, str kind, float eps, "
      "bool[] needs) -> Tensor[]",
      {at::Tag::pt2_compliant_tag});

  // Small ops write where they are told: the block owns all scratch.
  m.def(
      "norm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) y, str kind, float eps) -> ()");
  // Gradients of a norm's parameters are sums over chunks of rows, [chunks, C]: grad_chunks says
  // how many suit the device (heads: of a row of heads; else 0), sum_grads adds them up.
  m.def("grad_chunks(Tensor like, int rows, int cols, int heads) -> int");
  m.def("sum_grads(Tensor[] partials, Tensor(a!)[] grads) -> ()");
  m.def(
      "norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? dres, Tensor(a!)? dx, "
      "Tensor(b!)? dw, Tensor(c!)? db, str kind, float eps) -> ()");
  m.def(
      "residual_fwd(Tensor x, Tensor f, Tensor? rng_state, Tensor? post_w, Tensor? post_b, "
      "Tensor? next_w, Tensor? next_b, Tensor(a!)? sum, Tensor(b!)? normed, str post, "
      "float post_eps, str next, float next_eps, float m, float p, int site, int[] rows) -> ()");
  m.def(
      "residual_bwd(Tensor ds, Tensor? f, Tensor? rng_state, Tensor? post_w, Tensor(a!) df, "
      "Tensor(b!)? dpost_w, Tensor(c!)? dpost_b, str post, float post_eps, float m, float p, "
      "int site, int[] rows) -> ()");
  m.def(
      "activation_fwd(Tensor g, Tensor u, Tensor? rng_state, Tensor(a!) h, str act, float p, "
      "int site, int cols, int row0, int col0, int[] rows, Tensor? coefficients=None) -> ()");
  m.def(
      "activation_bwd(Tensor g, Tensor u, Tensor dh, Tensor? rng_state, Tensor(a!)? h, "
      "Tensor(b!)? dg, Tensor(c!)? du, str act, float p, int site, int cols, int row0, int col0, "
      "int[] rows, Tensor? coefficients=None, Tensor(d!)? sums=None) -> ()");
  // The gate and up products with the activation in one kernel, and their replay with the product
  // that makes dh. ffn_choice: the name of the kernel for [n, c] rows and f hidden columns, or
  // "cublas": products of the platform, then activation_fwd and activation_bwd.
  m.def("ffn_choice(Tensor like, ScalarType dtype, int n, int c, int f, str act) -> str");
  m.def(
      "ffn_up_fwd(Tensor x, Tensor? gate_w, Tensor up_w, Tensor? gate_b, Tensor? up_b, "
      "Tensor? rng_state, Tensor(a!) h, Tensor(b!)? g, Tensor(c!)? u, str act, bool transposed, "
      "float p, int site, int cols, int row0, int col0, int[] rows, str config='') -> ()");
  m.def(
      "ffn_up_bwd(Tensor? x, Tensor? gate_w, Tensor? up_w, Tensor? gate_b, Tensor? up_b, "
      "Tensor? g, Tensor? u, Tensor ddown, Tensor down_w, Tensor? rng_state, Tensor(a!)? h, "
      "Tensor(b!)? dg, Tensor(c!)? du, str act, bool transposed, float p, int site, int cols, "
      "int row0, int col0, int[] rows, str config='') -> ()");
  m.def(
      "qk_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? cos, Tensor? sin, Tensor(a!) y, "
      "str norm, float eps, str rope, int rotary_dim, Tensor? k=None, Tensor? k_weight=None, "
      "Tensor? k_bias=None, Tensor(b!)? k_out=None) -> ()");
  m.def(
      "qk_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? cos, Tensor? sin, Tensor(a!) dx, "
      "Tensor(b!)? dw, Tensor(c!)? db, str norm, float eps, str rope, int rotary_dim, "
      "Tensor? dk=None, Tensor? k=None, Tensor? k_weight=None, Tensor(d!)? dk_out=None, "
      "Tensor(e!)? dk_w=None, Tensor(f!)? dk_b=None, Tensor? dv=None, Tensor(g!)? dv_out=None) "
      "-> ()");
  // A row of logits to its loss, and to the gradient in its place.
  m.def(
      "cross_entropy_fwd(Tensor(a!) logits, Tensor target, Tensor? class_weight, Tensor(b!) loss, "
      "Tensor(c!) lse, Tensor(d!)? predicted, bool grad, int ignore_index, float smoothing, "
      "float scale, float softcap, float z_loss) -> ()");
  m.def(
      "cross_entropy_bwd(Tensor(a!) logits, Tensor target, Tensor? class_weight, Tensor lse, "
      "Tensor? factor, int classes, int col0, int ignore_index, float smoothing, float scale, "
      "float softcap, float z_loss) -> ()");
  // A tile of the queries of a batch (ops/attention.h): backward adds to dk and dv, which have the
  // accumulation type.
#define CKPT_ATTENTION_OPTIONS                                                            \
  "Tensor? mask, Tensor? padding, Tensor? cu_seqlens, Tensor? rng_state, str mask_kind, " \
  "str padding_kind, float scale, bool causal, int window, float softcap, float p"
  m.def("attention_tile_fwd(Tensor q, Tensor k, Tensor v, " CKPT_ATTENTION_OPTIONS
        ", int[] tile) -> (Tensor o, Tensor lse)");
  m.def(
      "attention_tile_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
      "Tensor(a!) dk, Tensor(b!) dv, " CKPT_ATTENTION_OPTIONS ", int[] tile) -> Tensor");
  // attention_triton_*: of a GPU's calls those that PyTorch's kernels do not do (attention_gpu.h).
  for (const std::string name : {"attention", "attention_triton"}) {
    const std::string options = CKPT_ATTENTION_OPTIONS;
    m.def((name + "_fwd(Tensor q, Tensor k, Tensor v, " + options + ") -> (Tensor o, Tensor lse)")
              .c_str(),
          {at::Tag::pt2_compliant_tag});
    m.def((name + "_bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, " + options +
           ") -> (Tensor dq, Tensor dk, Tensor dv)")
              .c_str(),
          {at::Tag::pt2_compliant_tag});
  }
}
