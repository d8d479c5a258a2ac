// Vectors, transposes and tile packing of the sparse convolution.
//
// One vector holds the same pixel and channel of kLanes tiles ("lanes"). A lane is a rectangle of one image, so a
// batch of one fills the vector as well as a batch of 64 does, and the kernels never meet an image border: what lies
// outside of the image is packed as zeros. Strides are split into phases while packing; the kernels see stride 1 only.
#ifndef SPARSEKIT_ENGINE_CONV_TILES_H_
#define SPARSEKIT_ENGINE_CONV_TILES_H_

#include <cstdint>
#include <cstring>

namespace sparsekit {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // NEON, SSE, or what the compiler makes of a four-vector elsewhere
#endif
constexpr int kVectorBytes = kLanes * static_cast<int>(sizeof(float));

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), may_alias));
typedef float LooseVec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Vec LoadLoose(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void StoreLoose(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }

inline Vec LoadPart(const float* p, int n) {
  float full[kLanes] = {};
  std::memcpy(full, p, n * sizeof(float));
  return LoadLoose(full);
}

inline void StorePart(float* p, Vec v, int n) {
  float full[kLanes];
  StoreLoose(full, v);
  std::memcpy(p, full, n * sizeof(float));
}

// Lower and upper half of a0 b0 a1 b1 ...
struct Interleaved {
  Vec low, high;
};

#if defined(__clang__)
template <int First>
inline Vec InterleaveFrom(Vec a, Vec b) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, First, First + 16, First + 1, First + 17, First + 2, First + 18, First + 3,
                                 First + 19, First + 4, First + 20, First + 5, First + 21, First + 6, First + 22,
                                 First + 7, First + 23);
#elif defined(__AVX__)
  return __builtin_shufflevector(a, b, First, First + 8, First + 1, First + 9, First + 2, First + 10, First + 3,
                                 First + 11);
#else
  return __builtin_shufflevector(a, b, First, First + 4, First + 1, First + 5);
#endif
}
#else
template <int First>
inline Vec InterleaveFrom(Vec a, Vec b) {
  IntVec order;
  for (int i = 0; i < kLanes; ++i) order[i] = First + i / 2 + (i % 2) * kLanes;
  return __builtin_shuffle(a, b, order);
}
#endif

inline Interleaved Interleave(Vec a, Vec b) {
  return {InterleaveFrom<0>(a, b), InterleaveFrom<kLanes / 2>(a, b)};
}

// log2(kLanes) perfect shuffles of the rows transpose the square.
inline void Transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 8
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Vec next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      const Interleaved pair = Interleave(rows[i], rows[i + kLanes / 2]);
      next[2 * i] = pair.low;
      next[2 * i + 1] = pair.high;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// Element i of the result is the sum over the lanes of rows[i].
inline Vec SumRows(const Vec* in) {
  Vec rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = in[i];
#pragma GCC unroll 8
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) {
      const Interleaved pair = Interleave(rows[i], rows[i + half]);
      rows[i] = pair.low + pair.high;
    }
  }
  return rows[0];
}

// An NHWC tensor; where `gate` is given only elements with gate > 0 count (the gradient of a ReLU).
struct Image {
  const float* data;
  const float* gate;
  int64_t height, width, channels;
};

// Tile origins of the lanes, in tile coordinates; image < 0 marks a lane past the last tile.
struct Lanes {
  int64_t image[kLanes], row[kLanes], col[kLanes];
};

// Tile coordinate c of a lane at origin o is pixel (o + c) * step + shift of the image.
struct Walk {
  int64_t row_step, row_shift, col_step, col_shift;
};

struct Window {
  int64_t row, col, rows, cols;  // in tile coordinates, from the lane's origin
};

// Packs a window of all lanes as [channel][row][col] vectors.
//
// Args: zeros: at least `channels` zero floats. channel_stride, pitch: vectors between channels and between rows.
inline void Pack(const Image& image, const Lanes& lanes, const Walk& walk, const Window& window, const float* zeros,
                 Vec* out, int64_t channel_stride, int64_t pitch) {
  const int64_t channels = image.channels;
  int64_t line[kLanes];
  for (int64_t r = 0; r < window.rows; ++r) {
    for (int l = 0; l < kLanes; ++l) {
      const int64_t y = (lanes.row[l] + window.row + r) * walk.row_step + walk.row_shift;
      line[l] = (lanes.image[l] < 0 || y < 0 || y >= image.height) ? -1 : (lanes.image[l] * image.height + y);
    }
    for (int64_t c = 0; c < window.cols; ++c) {
      const float* from[kLanes];
      const float* gate[kLanes];
      bool any = false;
      for (int l = 0; l < kLanes; ++l) {
        const int64_t x = (lanes.col[l] + window.col + c) * walk.col_step + walk.col_shift;
        const bool inside = line[l] >= 0 && x >= 0 && x < image.width;
        const int64_t at = (line[l] * image.width + x) * channels;
        from[l] = inside ? image.data + at : zeros;
        gate[l] = inside && image.gate != nullptr ? image.gate + at : zeros;
        any |= inside;
      }
      Vec* to = out + r * pitch + c;
      if (!any) {
        for (int64_t ch = 0; ch < channels; ++ch) to[ch * channel_stride] = Vec{};
        continue;
      }
      int64_t ch = 0;
      for (; ch + kLanes <= channels; ch += kLanes) {
        Vec rows[kLanes];
#pragma GCC unroll 16
        for (int l = 0; l < kLanes; ++l) rows[l] = LoadLoose(from[l] + ch);
        if (image.gate != nullptr) {
#pragma GCC unroll 16
          for (int l = 0; l < kLanes; ++l) rows[l] = LoadLoose(gate[l] + ch) > 0.0f ? rows[l] : Vec{};
        }
        Transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) to[(ch + i) * channel_stride] = rows[i];
      }
      if (ch < channels) {
        const int rest = static_cast<int>(channels - ch);
        Vec rows[kLanes];
        for (int l = 0; l < kLanes; ++l) {
          rows[l] = LoadPart(from[l] + ch, rest);
          if (image.gate != nullptr) rows[l] = LoadPart(gate[l] + ch, rest) > 0.0f ? rows[l] : Vec{};
        }
        Transpose(rows);
        for (int i = 0; i < rest; ++i) to[(ch + i) * channel_stride] = rows[i];
      }
    }
  }
}

// Writes the pixels of a packed [channel][row][col] window that lie inside of the image.
//
// Args: bias: `channels` floats or null. relu: clip at zero; NaN stays NaN.
inline void Unpack(const Vec* packed, int64_t channel_stride, int64_t pitch, const Lanes& lanes, const Walk& walk,
                   const Window& window, const float* bias, bool relu, float* data, int64_t height, int64_t width,
                   int64_t channels) {
  for (int64_t r = 0; r < window.rows; ++r) {
    int64_t line[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int64_t y = (lanes.row[l] + window.row + r) * walk.row_step + walk.row_shift;
      line[l] = (lanes.image[l] < 0 || y < 0 || y >= height) ? -1 : (lanes.image[l] * height + y);
    }
    for (int64_t c = 0; c < window.cols; ++c) {
      float* to[kLanes];
      bool all = true;
      for (int l = 0; l < kLanes; ++l) {
        const int64_t x = (lanes.col[l] + window.col + c) * walk.col_step + walk.col_shift;
        const bool inside = line[l] >= 0 && x >= 0 && x < width;
        to[l] = inside ? data + (line[l] * width + x) * channels : nullptr;
        all &= inside;
      }
      const Vec* from = packed + r * pitch + c;
      for (int64_t ch = 0; ch < channels; ch += kLanes) {
        const int n = static_cast<int>(channels - ch < kLanes ? channels - ch : kLanes);
        Vec rows[kLanes];
        if (n == kLanes) {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) rows[i] = from[(ch + i) * channel_stride];
        } else {
          for (int i = 0; i < kLanes; ++i) rows[i] = i < n ? from[(ch + i) * channel_stride] : Vec{};
        }
        Transpose(rows);
        if (bias != nullptr) {
          const Vec add = n == kLanes ? LoadLoose(bias + ch) : LoadPart(bias + ch, n);
#pragma GCC unroll 16
          for (int l = 0; l < kLanes; ++l) rows[l] += add;
        }
        if (relu) {
#pragma GCC unroll 16
          for (int l = 0; l < kLanes; ++l) rows[l] = rows[l] < 0.0f ? Vec{} : rows[l];
        }
        if (all && n == kLanes) {
#pragma GCC unroll 16
          for (int l = 0; l < kLanes; ++l) StoreLoose(to[l] + ch, rows[l]);
        } else {
          for (int l = 0; l < kLanes; ++l) {
            if (to[l] == nullptr) continue;
            if (n == kLanes) {
              StoreLoose(to[l] + ch, rows[l]);
            } else {
              StorePart(to[l] + ch, rows[l], n);
            }
          }
        }
      }
    }
  }
}

}  // namespace sparsekit

#endif  // SPARSEKIT_ENGINE_CONV_TILES_H_
