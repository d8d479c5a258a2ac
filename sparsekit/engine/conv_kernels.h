// Inner loops of the sparse convolution over packed tiles.
#ifndef SPARSEKIT_ENGINE_CONV_KERNELS_H_
#define SPARSEKIT_ENGINE_CONV_KERNELS_H_

#include "conv_tiles.h"

namespace sparsekit {

// One kept weight: where its operand lies, in bytes from the strip's first vector, and its value.
struct Entry {
  int32_t offset;
  float value;
};

// GCC would otherwise load a vector from memory once more for its second use, and the loads are what limits the loop.
inline void KeepInRegister(Vector& vector) {
#if defined(__SSE__)
  asm("" : "+v"(vector));
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#endif
}

constexpr int kMaxStripCols = 8;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kForwardStripRows = 2;  // 32 vector registers: 16 sums
constexpr int kBackwardStripCols = 8;
#else
constexpr int kForwardStripRows = 1;  // 16 vector registers: 8 sums
constexpr int kBackwardStripCols = 5;
#endif

// Pixels of a strip that are asked for from memory while the lists run, one lane for each list.
struct Ahead {
  const float* data = nullptr;  // null: none
  const int64_t* at = nullptr;  // [pixel][lane]

  template <int Pixels, bool Write>
  void Fetch(int64_t lane) const {
    if (data == nullptr) return;
#pragma GCC unroll 16
    for (int i = 0; i < Pixels; ++i) __builtin_prefetch(data + at[i * kLanes + lane], Write, 3);
  }
};

// sums[o] (+)= value * operand over the entries of each list o; a strip is Rows x Cols pixels, held in registers.
//
// Args: starts: first entry of each of the `count` <= kLanes lists, and the end of the last. pitch: bytes from row to
// row. results: where the sums will be written to.
template <int Rows, int Cols>
void ForwardStrip(const Entry* entries, const int32_t* starts, int64_t count, const char* operand, int64_t pitch,
                  bool first, Vec* sums, Ahead results) {
  for (int64_t o = 0; o < count; ++o, sums += Rows * Cols) {
    results.Fetch<Rows * Cols, true>(o);
    const Entry* entry = entries + starts[o];
    const Entry* const end = entries + starts[o + 1];
    if (entry == end && !first) continue;
    Vector sum[Rows * Cols];
#pragma GCC unroll 16
    for (int i = 0; i < Rows * Cols; ++i) sum[i] = first ? Vector{} : static_cast<Vector>(sums[i]);
    for (; entry != end; ++entry) {
      const float value = entry->value;
      const char* at = operand + entry->offset;
#pragma GCC unroll 2
      for (int r = 0; r < Rows; ++r) {
        const Vec* row = reinterpret_cast<const Vec*>(at + r * pitch);
#pragma GCC unroll 8
        for (int c = 0; c < Cols; ++c) sum[r * Cols + c] += value * row[c];
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < Rows * Cols; ++i) sums[i] = sum[i];
  }
}

// Sums of value gradients on their way from lanes to the list of entries.
//
// Vectors gather in a ring; every kLanes of them become one vector of sums over their lanes.
class ValueSums {
 public:
  static constexpr int kRing = 4 * kLanes;

  // Args: sums: one float for each entry, rounded up to whole vectors. begin: the first entry to come.
  ValueSums(float* sums, int64_t begin) : sums_(sums), flushed_(begin / kLanes * kLanes) {
    for (int64_t e = flushed_; e < begin; ++e) *At(e) = Vec{};
  }

  Vec* At(int64_t entry) { return ring_ + (entry & (kRing - 1)); }

  void FlushBefore(int64_t entry) {
    for (; flushed_ + kLanes <= entry; flushed_ += kLanes) {
      Vec* to = reinterpret_cast<Vec*>(sums_ + flushed_);
      *to += simd::SumLanes(reinterpret_cast<const float*>(At(flushed_)));
    }
  }

  void FlushAll(int64_t entries) {
    FlushBefore(entries);
    if (flushed_ == entries) return;
    for (int64_t e = entries; e < flushed_ + kLanes; ++e) *At(e) = Vec{};
    FlushBefore(flushed_ + kLanes);
  }

 private:
  float* sums_;
  int64_t flushed_;
  Vec ring_[kRing];
};

// For each list i of entries: input_gradient[i] (+)= value * operand, and the sum over the strip's pixels of
// input[i] * operand for each entry: one load of the output gradient feeds both.
template <int Cols, bool InputGradient>
void BackwardStrip(const Entry* entries, const int32_t* starts, int64_t count, const char* operand, const Vec* input,
                   bool first, Vec* input_gradient, ValueSums* value_sums, Ahead inputs, Ahead results) {
  for (int64_t i = 0; i < count; ++i, input += Cols, input_gradient += Cols) {
    inputs.Fetch<Cols, false>(i);
    results.Fetch<Cols, true>(i);
    int32_t e = starts[i];
    const int32_t end = starts[i + 1];
    if (e == end && !first) continue;
    Vector in[Cols], gradient[Cols];
#pragma GCC unroll 8
    for (int c = 0; c < Cols; ++c) {
      in[c] = input[c];
      if (InputGradient) gradient[c] = first ? Vector{} : static_cast<Vector>(input_gradient[c]);
    }
    while (e != end) {
      const int32_t room = ValueSums::kRing - (e & (ValueSums::kRing - 1));
      const int32_t stop = end - e < room ? end : e + room;
      Vec* to = value_sums->At(e);
      for (; e != stop; ++e, ++to) {
        const Vec* at = reinterpret_cast<const Vec*>(operand + entries[e].offset);
        const float value = entries[e].value;
        Vector even{}, odd{};
#pragma GCC unroll 8
        for (int c = 0; c < Cols; ++c) {
          Vector out = at[c];
          KeepInRegister(out);
          if (InputGradient) gradient[c] += value * out;
          if (c == 0) {
            even = in[c] * out;
          } else if (c == 1) {
            odd = in[c] * out;
          } else if (c % 2 == 0) {
            even += in[c] * out;
          } else {
            odd += in[c] * out;
          }
        }
        *to = Cols > 1 ? even + odd : even;
      }
      value_sums->FlushBefore(e);
    }
    if (InputGradient) {
#pragma GCC unroll 8
      for (int c = 0; c < Cols; ++c) input_gradient[c] = gradient[c];
    }
  }
}

using ForwardKernel = void (*)(const Entry*, const int32_t*, int64_t, const char*, int64_t, bool, Vec*, Ahead);
using BackwardKernel = void (*)(const Entry*, const int32_t*, int64_t, const char*, const Vec*, bool, Vec*,
                                ValueSums*, Ahead, Ahead);

template <int Rows>
ForwardKernel ForwardKernelOf(int64_t cols) {
  switch (cols) {
    case 1: return ForwardStrip<Rows, 1>;
    case 2: return ForwardStrip<Rows, 2>;
    case 3: return ForwardStrip<Rows, 3>;
    case 4: return ForwardStrip<Rows, 4>;
    case 5: return ForwardStrip<Rows, 5>;
    case 6: return ForwardStrip<Rows, 6>;
    case 7: return ForwardStrip<Rows, 7>;
    default: return ForwardStrip<Rows, 8>;
  }
}

template <bool InputGradient>
BackwardKernel BackwardKernelOf(int64_t cols) {
  switch (cols) {
    case 1: return BackwardStrip<1, InputGradient>;
    case 2: return BackwardStrip<2, InputGradient>;
    case 3: return BackwardStrip<3, InputGradient>;
    case 4: return BackwardStrip<4, InputGradient>;
    case 5: return BackwardStrip<5, InputGradient>;
    case 6: return BackwardStrip<6, InputGradient>;
    case 7: return BackwardStrip<7, InputGradient>;
    default: return BackwardStrip<8, InputGradient>;
  }
}

}  // namespace sparsekit

#endif  // SPARSEKIT_ENGINE_CONV_KERNELS_H_
