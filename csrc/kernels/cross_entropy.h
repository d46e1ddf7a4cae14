#pragma once

#include <cstdint>

#include "math/cross_entropy.h"
#include "math/types.h"

namespace ckptfused {

// What the cross-entropy kernels of every device take: rows of logits, of which a call has all
// classes or, backward, the `cols` from class col0 on. "acc" is double for double logits, else
// float.
struct CrossEntropyShape {
  DType dtype;
  int64_t classes;             // V
  int64_t cols, col0, stride;  // those of this call, the first one, elements between rows
  const int64_t* target;       // [rows]
  int64_t ignore_index;        // rows with this target have loss and gradient 0
  const void* class_weight;    // acc [V + 1], the last one their sum, or null: all 1
  double scale, softcap;       // LogitMap
  double smoothing, smooth;    // s and s/V
  double z_loss;
};

// Each row's loss and log-sum-exp and, where asked for, its largest logit's class; then, where
// `grad` says so, dloss/dlogits of a row in place of its logits.
struct CrossEntropyFwd : CrossEntropyShape {
  void* logits;
  void* loss;          // acc [rows]
  void* lse;           // acc [rows]
  int64_t* predicted;  // [rows], or null
  bool grad;
};

// The gradient alone, in place of the logits, for a log-sum-exp that is known.
struct CrossEntropyBwd : CrossEntropyShape {
  void* logits;
  const void* lse;     // acc [rows]
  const void* factor;  // acc [rows]: what each row's loss is multiplied by; null: 1
};

}  // namespace ckptfused
