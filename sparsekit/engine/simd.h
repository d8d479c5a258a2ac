// One vector type of the widest width that the compiler's target has, and the few moves the kernels need.
//
// Everything is written with the vector extensions that GCC and Clang share, so that AVX-512, AVX2, SSE and NEON differ
// in the width alone.

#ifndef SPARSEKIT_ENGINE_SIMD_H_
#define SPARSEKIT_ENGINE_SIMD_H_

// A lane of 64 bits is read as two of 32, and a word as eight bytes of a mask, the lowest first.
#if __SIZEOF_POINTER__ != 8 || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the engine needs a 64-bit little-endian CPU"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparsekit {
namespace simd {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// Registers' worth of batch lanes that a kernel carries at once. More would hide nothing more of a multiply-add's latency
// and take more of the cache.
#if defined(__aarch64__)
constexpr int kMaxVectors = 8;
#else
constexpr int kMaxVectors = 4;
#endif

constexpr int kBytes = kWidth * static_cast<int>(sizeof(float));

typedef float Vector __attribute__((vector_size(kBytes)));
typedef int32_t IntVector __attribute__((vector_size(kBytes)));
typedef uint32_t WordVector __attribute__((vector_size(kBytes)));
// The same at any address, and allowed to alias the float arrays that it is loaded from.
typedef float LooseVector __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef float TightVector __attribute__((vector_size(kBytes), may_alias));

#define SPARSEKIT_INLINE inline __attribute__((always_inline))

SPARSEKIT_INLINE Vector Load(const float* from) { return *reinterpret_cast<const LooseVector*>(from); }
SPARSEKIT_INLINE void Store(float* to, Vector value) { *reinterpret_cast<LooseVector*>(to) = value; }
SPARSEKIT_INLINE Vector LoadAligned(const float* from) { return *reinterpret_cast<const TightVector*>(from); }
SPARSEKIT_INLINE void StoreAligned(float* to, Vector value) { *reinterpret_cast<TightVector*>(to) = value; }
SPARSEKIT_INLINE Vector Broadcast(float value) { return value - Vector{}; }
SPARSEKIT_INLINE Vector Select(IntVector where, Vector yes, Vector no) {
  return reinterpret_cast<Vector>((where & reinterpret_cast<IntVector>(yes)) |
                                  (~where & reinterpret_cast<IntVector>(no)));
}
// NaN stays NaN, as TensorFlow's own Relu has it.
SPARSEKIT_INLINE Vector Relu(Vector value) { return Select(value <= Vector{}, Vector{}, value); }

// a0 b0 a1 b1 ... of the lower halves, and of the upper halves.
#if defined(__clang__)
#define SPARSEKIT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SPARSEKIT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVector{__VA_ARGS__})
#endif

SPARSEKIT_INLINE Vector ZipLow(Vector a, Vector b) {
#if defined(__AVX512F__)
  return SPARSEKIT_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX__)
  return SPARSEKIT_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return SPARSEKIT_SHUFFLE(a, b, 0, 4, 1, 5);
#endif
}

SPARSEKIT_INLINE Vector ZipHigh(Vector a, Vector b) {
#if defined(__AVX512F__)
  return SPARSEKIT_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX__)
  return SPARSEKIT_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return SPARSEKIT_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// kWidth x kWidth transpose in registers: log2(kWidth) rounds, each zips row i with row i + kWidth / 2.
SPARSEKIT_INLINE void Transpose(Vector rows[kWidth]) {
  Vector other[kWidth];
  Vector* from = rows;
  Vector* to = other;
#pragma GCC unroll 4
  for (int round = 1; round < kWidth; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      to[2 * i] = ZipLow(from[i], from[i + kWidth / 2]);
      to[2 * i + 1] = ZipHigh(from[i], from[i + kWidth / 2]);
    }
    Vector* swap = from;
    from = to;
    to = swap;
  }
  if (from != rows) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) rows[i] = from[i];
  }
}

// Lane i of the result is the sum over the lanes of rows[i], always added in the same order.
SPARSEKIT_INLINE Vector SumLanes(const float* rows) {
  Vector part[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) part[i] = LoadAligned(rows + i * kWidth);
#pragma GCC unroll 4
  for (int half = kWidth / 2; half >= 1; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) part[i] = ZipLow(part[i], part[i + half]) + ZipHigh(part[i], part[i + half]);
  }
  return part[0];
}

// Reads up to kWidth x kWidth numbers, rows `stride` apart, and writes kWidth columns `lanes` apart; what is missing is 0.
template <typename Load>
SPARSEKIT_INLINE void TransposeIn(const Load& load, int64_t height, int64_t width, float* to, int64_t lanes) {
  Vector block[kWidth];
  if (height >= kWidth && width >= kWidth) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) block[i] = load.Whole(i);
  } else {
    alignas(kBytes) float edge[kWidth * kWidth] = {};
    for (int64_t i = 0; i < height && i < kWidth; ++i) {
      for (int64_t j = 0; j < width && j < kWidth; ++j) edge[i * kWidth + j] = load.One(i, j);
    }
    for (int i = 0; i < kWidth; ++i) block[i] = LoadAligned(edge + i * kWidth);
  }
  Transpose(block);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) StoreAligned(to + i * lanes, block[i]);
}

// The way back: kWidth columns `lanes` apart become up to `height` rows of up to `width` numbers, `stride` apart.
SPARSEKIT_INLINE void TransposeOut(const float* from, int64_t lanes, float* to, int64_t stride, int64_t height,
                                   int64_t width) {
  Vector block[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) block[i] = LoadAligned(from + i * lanes);
  Transpose(block);
  if (height >= kWidth && width >= kWidth) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) Store(to + i * stride, block[i]);
  } else {
    alignas(kBytes) float edge[kWidth * kWidth];
    for (int i = 0; i < kWidth; ++i) StoreAligned(edge + i * kWidth, block[i]);
    for (int64_t i = 0; i < height && i < kWidth; ++i) {
      const int64_t count = width < kWidth ? width : kWidth;
      memcpy(to + i * stride, edge + i * kWidth, count * sizeof(float));
    }
  }
}

// Plain rows of an array.
struct Rows {
  const float* from;
  int64_t stride;
  Vector Whole(int64_t row) const { return Load(from + row * stride); }
  float One(int64_t row, int64_t column) const { return from[row * stride + column]; }
  Rows At(int64_t row, int64_t column) const { return {from + row * stride + column, stride}; }
};

// Rows of a gradient that a ReLU has let through: where its output is not above zero, the gradient is zero.
struct GatedRows {
  const float* from;
  const float* gate;
  int64_t stride;
  Vector Whole(int64_t row) const {
    return Select(Load(gate + row * stride) > Vector{}, Load(from + row * stride), Vector{});
  }
  float One(int64_t row, int64_t column) const {
    return gate[row * stride + column] > 0.0f ? from[row * stride + column] : 0.0f;
  }
  GatedRows At(int64_t row, int64_t column) const {
    return {from + row * stride + column, gate + row * stride + column, stride};
  }
};

}  // namespace simd
}  // namespace sparsekit

#endif  // SPARSEKIT_ENGINE_SIMD_H_
