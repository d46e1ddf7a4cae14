#pragma once

#include <cstdint>

#include "math/types.h"

namespace ckptfused {

// Operands of the matrix products between attention's row kernels, copied to where and as a product
// wants them. T is the type that they are stored in, C the one that is multiplied: T itself, or its
// accumulation type.
//
// A left operand is a matrix of C, row by row. So is a right one, but that two rows of a 16-bit C
// lie interleaved: entries (2i, j) and (2i + 1, j) side by side, as dot-product instructions take
// them ("VNNI"). Sizes that a product asks for beyond those of the data are filled with zeros.
template <typename C>
constexpr int64_t kRowsAbreast = sizeof(C) == 2 ? 2 : 1;

// left [out_rows, out_cols] = in [rows, cols], whose rows are stride apart.
template <typename T, typename C>
void left_rows(const T* in, int64_t stride, int64_t rows, int64_t cols, C* left, int64_t out_rows,
               int64_t out_cols);
// left [cols, out_cols] = in transposed.
template <typename T, typename C>
void left_columns(const T* in, int64_t stride, int64_t rows, int64_t cols, C* left,
                  int64_t out_cols);

// right [out_rows, cols] = in; out_rows is a multiple of kRowsAbreast.
template <typename T, typename C>
void right_rows(const T* in, int64_t stride, int64_t rows, int64_t cols, C* right,
                int64_t out_rows);
// right [out_rows, out_cols] = in transposed.
template <typename T, typename C>
void right_columns(const T* in, int64_t stride, int64_t rows, int64_t cols, C* right,
                   int64_t out_rows, int64_t out_cols);

// sums [rows, cols] += products [cols, rows] transposed, whose rows are product_stride apart.
template <typename A>
void add_transposed(const A* products, int64_t product_stride, int64_t rows, int64_t cols, A* sums,
                    int64_t stride);

}  // namespace ckptfused
