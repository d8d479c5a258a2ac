// Vectors, transposes and tile packing of the sparse convolution.
//
// One vector holds the same pixel and channel of kLanes tiles ("lanes"). A lane is a rectangle of one image, so a
// batch of one fills the vector as well as a batch of 64 does, and the kernels never meet an image border: what lies
// outside of the image is packed as zeros. Strides are split into phases while packing; the kernels see stride 1 only.
#ifndef SPARSEKIT_ENGINE_CONV_TILES_H_
#define SPARSEKIT_ENGINE_CONV_TILES_H_

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace sparsekit {

using simd::Vector;

constexpr int kLanes = simd::kWidth;
constexpr int kVectorBytes = simd::kBytes;

// A vector in memory, whatever else the memory is read as.
typedef simd::TightVector Vec;

inline Vector LoadPart(const float* p, int n) {
  float full[kLanes] = {};
  std::memcpy(full, p, n * sizeof(float));
  return simd::Load(full);
}

inline void StorePart(float* p, Vector v, int n) {
  float full[kLanes];
  simd::Store(full, v);
  std::memcpy(p, full, n * sizeof(float));
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

// Where each pixel of a window lies: [pixel][lane], the element of its first channel, or -1 outside of the image.
inline void Locate(const Lanes& lanes, const Walk& walk, const Window& window, int64_t height, int64_t width,
                   int64_t channels, int64_t* at) {
  for (int64_t r = 0; r < window.rows; ++r) {
    int64_t line[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const int64_t y = (lanes.row[l] + window.row + r) * walk.row_step + walk.row_shift;
      line[l] = (lanes.image[l] < 0 || y < 0 || y >= height) ? -1 : (lanes.image[l] * height + y);
    }
    for (int64_t c = 0; c < window.cols; ++c, at += kLanes) {
      for (int l = 0; l < kLanes; ++l) {
        const int64_t x = (lanes.col[l] + window.col + c) * walk.col_step + walk.col_shift;
        at[l] = line[l] >= 0 && x >= 0 && x < width ? (line[l] * width + x) * channels : -1;
      }
    }
  }
}

// Packs channels first..end of one pixel, to[(channel - first) * stride].
//
// Args: at: the pixel's place in each lane. zeros: at least `end` zero floats, what lies outside of the image.
inline void PackPixel(const Image& image, const int64_t* at, const float* zeros, int64_t first, int64_t end, Vec* to,
                      int64_t stride) {
  const float* from[kLanes];
  const float* gate[kLanes];
  bool any = false;
  for (int l = 0; l < kLanes; ++l) {
    from[l] = at[l] >= 0 ? image.data + at[l] : zeros;
    gate[l] = at[l] >= 0 && image.gate != nullptr ? image.gate + at[l] : zeros;
    any |= at[l] >= 0;
  }
  if (!any) {
    for (int64_t ch = first; ch < end; ++ch, to += stride) *to = Vec{};
    return;
  }
  int64_t ch = first;
  for (; ch + kLanes <= end; ch += kLanes, to += kLanes * stride) {
    Vector rows[kLanes];
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) rows[l] = simd::Load(from[l] + ch);
    if (image.gate != nullptr) {
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; ++l) rows[l] = simd::Select(simd::Load(gate[l] + ch) > Vector{}, rows[l], Vector{});
    }
    simd::Transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) to[i * stride] = rows[i];
  }
  if (ch < end) {
    const int rest = static_cast<int>(end - ch);
    Vector rows[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      rows[l] = LoadPart(from[l] + ch, rest);
      if (image.gate != nullptr) rows[l] = simd::Select(LoadPart(gate[l] + ch, rest) > Vector{}, rows[l], Vector{});
    }
    simd::Transpose(rows);
    for (int i = 0; i < rest; ++i) to[i * stride] = rows[i];
  }
}

// Packs a whole window as [channel][row][col] vectors.
//
// Args: channel_stride, pitch: vectors between channels and between rows.
inline void Pack(const Image& image, const Lanes& lanes, const Walk& walk, const Window& window, const float* zeros,
                 Vec* to, int64_t channel_stride, int64_t pitch) {
  constexpr int64_t kPiece = 16;
  int64_t at[kPiece * kLanes];
  for (int64_t r = 0; r < window.rows; ++r) {
    for (int64_t c = 0; c < window.cols; c += kPiece) {
      const int64_t piece = window.cols - c < kPiece ? window.cols - c : kPiece;
      Locate(lanes, walk, {window.row + r, window.col + c, 1, piece}, image.height, image.width, image.channels, at);
      for (int64_t i = 0; i < piece; ++i) {
        PackPixel(image, at + i * kLanes, zeros, 0, image.channels, to + r * pitch + c + i, channel_stride);
      }
    }
  }
}

// Writes channels first..first+count (at most kLanes) of one packed pixel to where it lies inside of the image.
//
// Args: from: the first channel's vector, the others `stride` apart. bias: indexed by channel, or null. relu: clip at
// zero; NaN stays NaN.
inline void UnpackPixel(const Vec* from, int64_t stride, const int64_t* at, int64_t first, int count,
                        const float* bias, bool relu, float* data) {
  Vector rows[kLanes];
  if (count == kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = from[i * stride];
  } else {
    for (int i = 0; i < kLanes; ++i) rows[i] = i < count ? static_cast<Vector>(from[i * stride]) : Vector{};
  }
  simd::Transpose(rows);
  if (bias != nullptr) {
    const Vector add = count == kLanes ? simd::Load(bias + first) : LoadPart(bias + first, count);
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) rows[l] += add;
  }
  if (relu) {
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) rows[l] = simd::Relu(rows[l]);
  }
  bool all = count == kLanes;
  for (int l = 0; l < kLanes; ++l) all &= at[l] >= 0;
  if (all) {
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) simd::Store(data + at[l] + first, rows[l]);
    return;
  }
  for (int l = 0; l < kLanes; ++l) {
    if (at[l] < 0) continue;
    if (count == kLanes) {
      simd::Store(data + at[l] + first, rows[l]);
    } else {
      StorePart(data + at[l] + first, rows[l], count);
    }
  }
}

}  // namespace sparsekit

#endif  // SPARSEKIT_ENGINE_CONV_TILES_H_
